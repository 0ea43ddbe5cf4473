\ir _begin.sql
\ir _queue.sql
select plan(13);

select outcome, message_id as fresh from baton.send('fresh', '1', dedupe_key => 'k') \gset
select outcome, message_id as delayed from baton.send('delayed', '1', '1 hour') \gset
select * from baton_test.hold('held') \gset h
select * from baton_test.hold('parked') \gset p
select outcome from baton.park(:pm, :pd, '1 hour') \gset
select * from baton_test.hold('dead') \gset d
select outcome from baton.fail(:dm, :dd, 'no', final => true) \gset
select message_id as outbox from baton._insert_keyed('baton.deliveries', '{}', null, 'key', null, null) \gset

select results_eq(
  format(
    'select r.outcome, r.message_id
    from baton.remove_messages(array[%s, %s, %s, null, %s, %s, -1, %s, %s])
      with ordinality as r (outcome, message_id, nth)
    order by r.nth',
    :pm, :hm, :fresh, :delayed, :dm, :outbox, :fresh
  ),
  format(
    $$values
    ('removed', %s::bigint), ('in_flight', %s), ('removed', %s), ('unknown', null), ('removed', %s), ('unknown', %s),
    ('unknown', -1), ('unknown', %s), ('unknown', %s)$$,
    :pm, :hm, :fresh, :delayed, :dm, :outbox, :fresh
  ),
  'remove_messages: a row an id, in their order: what nobody holds goes; the dead and the package''s own are unknown'
);
select set_eq(
  $$select m.message_id from baton.messages as m$$, array[:hm, :outbox]::bigint[], 'remove_messages: the others stay'
);
select is((select count(*) from baton.dead_messages), 1::bigint, 'remove_messages: the dead too');
select results_eq(
  $$select i.kind, i.at, i.queue_name, i.message_id, i.detail from baton.incidents as i
  where i.kind <> 'limit_reached' order by i.message_id$$,
  format(
    $$select 'operator', baton._now(), v.queue_name, v.message_id::bigint, '{"verb": "remove_messages"}'::jsonb
    from (values ('fresh', %s), ('delayed', %s), ('parked', %s)) as v (queue_name, message_id) order by v.message_id$$,
    :fresh, :delayed, :pm
  ),
  'remove_messages: an incident tells of each'
);

select baton_test.advance('29.999999 seconds') \gset
select is(
  (select outcome from baton.remove_messages(array[:hm])), 'in_flight',
  'remove_messages: a microsecond before its deadline a claim lives'
);
select is((select outcome from baton.extend(:hm, :hd, '0')), 'extended', 'remove_messages: and is left alone');
select baton_test.advance('1 microsecond') \gset
select is(
  (select outcome from baton.remove_messages(array[:hm])), 'removed',
  'remove_messages: one that has run out does not keep a message'
);
select is((select outcome from baton.ack(:hm, :hd)), 'lost', 'remove_messages: its receipt is lost then');
select is((select outcome from baton.extend(:hm, :hd)), 'lost', 'remove_messages: and cannot be extended');
select message_id as f from baton.send('odd', '1') \gset
select message_id as g from baton.send('odd', '1') \gset
select results_eq(
  format($$select outcome, message_id from baton.remove_messages('[0:1]={%s, %s}')$$, :f, :g),
  format($$values ('removed', %s::bigint), ('removed', %s)$$, :f, :g),
  'remove_messages: an array may begin at any number'
);
select message_id as f from baton.send('odd', '1') \gset
select message_id as g from baton.send('odd', '1') \gset
select results_eq(
  format($$select outcome, message_id from baton.remove_messages('{{%s, 0}, {%s, 0}}')$$, :f, :g),
  format($$values ('removed', %s::bigint), ('unknown', 0), ('removed', %s), ('unknown', 0)$$, :f, :g),
  'remove_messages: and have two dimensions'
);
select is_empty($$select * from baton.remove_messages('{}')$$, 'remove_messages: of nothing comes nothing');
select is_empty($$select * from baton.remove_messages(null)$$, 'remove_messages: nor of null');

select * from finish();
rollback;
