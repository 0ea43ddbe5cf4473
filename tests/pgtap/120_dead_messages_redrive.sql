\ir _begin.sql
\ir _queue.sql
select plan(20);

create function baton_test.bury(queue_name text, dedupe_key text default null)
returns bigint
language plpgsql
volatile
as $$
declare
  v_held record;
begin
  select h.m, h.d into v_held from baton_test.hold(bury.queue_name, bury.dedupe_key) as h;
  perform baton.fail(v_held.m, v_held.d, 'broken', final => true);
  return v_held.m;
end;
$$;

select baton_test.bury('q', 'k') as a \gset
select baton_test.advance('1 hour') \gset
select results_eq(
  format('select outcome, message_id from baton.redrive(array[%s])', :a),
  format($$values ('redriven', %s::bigint)$$, :a), 'redrive: a dead message comes back'
);
select is(baton_test.state(:a), '2026-01-01 01:00:00+00 free 0 0', 'redrive: due at once, with both counters at 0');
select results_eq(
  format(
    $$select
      m.queue_name, m.kind, m.payload, m.headers, m.dedupe_key, m.delivery, m.claimed_at, m.last_error, m.created_at
    from baton.messages as m where m.message_id = %s$$, :a
  ),
  $$values (
    'q', 'mail', '"held"'::jsonb, '{"h": 1}'::jsonb, 'k', null::bigint, null::timestamptz, 'broken',
    timestamptz '2026-01-01 00:00:00+00'
  )$$,
  'redrive: as it was sent, with its last error'
);
select is((select count(*) from baton.dead_messages), 0::bigint, 'redrive: it is not among the dead any more');
select results_eq(
  $$select i.at, i.queue_name, i.message_id, i.detail from baton.incidents as i where i.kind = 'operator'$$,
  format($$select baton._now(), 'q', %s::bigint, '{"verb": "redrive"}'::jsonb$$, :a),
  'redrive: an incident tells of it'
);
select is(
  (select message_id from baton.send('q', '1', dedupe_key => 'k')), :a::bigint,
  'redrive: it holds its key again'
);
select results_eq(
  $$select c.message_id, c.failures, c.lapses, c.payload from baton.claim('q') as c$$,
  format($$values (%s::bigint, 0, 0, '"held"'::jsonb)$$, :a), 'redrive: it is given out under the same id'
);
select message_id as next from baton.send('q', '1') \gset
select cmp_ok(:next::bigint, '>', :a::bigint, 'redrive: ids of later messages are not touched');

-- Keys

select baton_test.bury('keys', 'k') as b \gset
select baton_test.bury('keys', 'k') as c \gset
select baton_test.bury('keys') as n1 \gset
select baton_test.bury('keys') as n2 \gset
select baton_test.bury('other', 'k') as o \gset
select outcome, message_id as live from baton.send('keys', '"live"', dedupe_key => 'k') \gset
select results_eq(
  format('select outcome, message_id from baton.redrive(array[%s])', :b),
  format($$values ('key_taken', %s::bigint)$$, :b), 'redrive: not while a live message holds its key'
);
select results_eq(
  $$select d.message_id from baton.dead_messages as d where d.dedupe_key = 'k' and d.queue_name = 'keys' order by 1$$,
  array[:b, :c]::bigint[], 'redrive: such a message stays dead'
);
select delivery as d from baton.claim('keys') \gset
select outcome from baton.redrive(array[:b]) \gset
select is(:'outcome'::text, 'key_taken', 'redrive: nor while that one is in flight');
select outcome from baton.ack(:live, :d) \gset
select results_eq(
  format(
    'select r.outcome, r.message_id
    from baton.redrive(array[%s, null, %s, -1, %s, %s, %s, %s]) with ordinality as r (outcome, message_id, nth)
    order by r.nth',
    :n2, :c, :o, :b, :n1, :n2
  ),
  format(
    $$values
    ('redriven', %s::bigint), ('unknown', null), ('key_taken', %s), ('unknown', -1), ('redriven', %s), ('redriven', %s),
    ('redriven', %s), ('unknown', %s)$$,
    :n2, :c, :o, :b, :n1, :n2
  ),
  'redrive: a row an id, in their order: of two with one key the older comes back, and an id twice counts once'
);
select is(baton_test.state(:c), null, 'redrive: the other stays dead');
select results_eq(
  format('select outcome from baton.redrive(array[%s])', :b), array['unknown'], 'redrive: a live message is not dead'
);
select baton_test.bury('odd') as f \gset
select baton_test.bury('odd') as g \gset
select results_eq(
  format($$select outcome, message_id from baton.redrive('[0:1]={%s, %s}')$$, :f, :g),
  format($$values ('redriven', %s::bigint), ('redriven', %s)$$, :f, :g), 'redrive: an array may begin at any number'
);
select baton_test.bury('odd') as f \gset
select baton_test.bury('odd') as g \gset
select results_eq(
  format($$select outcome, message_id from baton.redrive('{{%s, 0}, {%s, 0}}')$$, :f, :g),
  format($$values ('redriven', %s::bigint), ('unknown', 0), ('redriven', %s), ('unknown', 0)$$, :f, :g),
  'redrive: and have two dimensions'
);
select is_empty($$select * from baton.redrive('{}')$$, 'redrive: of nothing comes nothing');
select is_empty($$select * from baton.redrive(null)$$, 'redrive: nor of null');

-- And again

select baton_test.bury('again', 'k') as e \gset
select outcome from baton.redrive(array[:e]) \gset
select delivery as d from baton.claim('again') \gset
select outcome from baton.fail(:e, :d, 'still broken', final => true) \gset
select results_eq(
  format('select d.failures, d.last_error from baton.dead_messages as d where d.message_id = %s', :e),
  $$values (1, 'still broken')$$, 'redrive: it may die again'
);
select outcome from baton.redrive(array[:e]) \gset
select is(:'outcome'::text, 'redriven', 'redrive: and come back again');

select * from finish();
rollback;
