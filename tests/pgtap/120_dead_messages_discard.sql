\ir _begin.sql
\ir _queue.sql
select plan(5);

select * from baton_test.hold('q', 'k') \gset a
select outcome from baton.fail(:am, :ad, 'no', final => true) \g /dev/null
select * from baton_test.hold('q') \gset b
select outcome from baton.fail(:bm, :bd, 'no', final => true) \g /dev/null
select outcome, message_id as live from baton.send('q', '1') \gset

select results_eq(
  format(
    'select r.outcome, r.message_id from baton.discard(array[%s, %s, null, %s]) with ordinality as r (outcome, message_id, nth)
    order by r.nth',
    :live, :am, :am
  ),
  format($$values ('unknown', %s::bigint), ('discarded', %s), ('unknown', null), ('unknown', %s)$$, :live, :am, :am),
  'discard: a row an id, in their order: the dead go, the living are unknown'
);
select is((select array_agg(message_id) from baton.dead_letters), array[:bm]::bigint[], 'discard: the others stay');
select is(baton_test.state(:live), '2026-01-01 00:00:00+00 free 0 0', 'discard: and the living');
select results_eq(
  $$select i.at, i.queue_name, i.message_id, i.detail from baton.incidents as i where i.kind = 'operator'$$,
  format($$select baton._now(), 'q', %s::bigint, '{"verb": "discard"}'::jsonb$$, :am), 'discard: an incident tells of it'
);
select is((select count(*) from baton.discard('{}')), 0::bigint, 'discard: of nothing comes nothing');

select * from finish();
rollback;
