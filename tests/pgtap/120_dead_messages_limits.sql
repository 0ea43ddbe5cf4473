/*
 * A message is at its limit when no claim of it lives and its failures, or its lapses plus one if its claim ran out,
 * have reached a setting. fail ends it at once, tick ends the rest.
 */
\ir _begin.sql
\ir _queue.sql
select plan(42);

create function baton_test.dead_part()
returns integer
language sql
volatile
begin atomic
  select t.changed from baton.tick() as t where t.part = 'dead_letters';
end;

-- Lapses

select baton_test.set_limits(3, 3) \gset
select * from baton_test.hold('q', 'k') \gset a
select baton_test.advance('30 seconds') \gset
select lapses from baton.claim('q') \gset
select baton_test.advance('30 seconds') \gset
select delivery as last, lapses from baton.claim('q') \gset
select is(:lapses, 2, 'limits: below its limit of lapses a message is given out');
select is(baton_test.dead_part(), null, 'limits: it is never at its limit while it is claimed');
select baton_test.advance('29.999999 seconds') \gset
select is(baton_test.dead_part(), null, 'limits: nor a microsecond before that claim runs out');
select baton_test.advance('1 microsecond') \gset
select is_empty($$select * from baton.claim('q')$$, 'limits: at the deadline it is, and claims skip it');
select is(baton_test.state(:am), '2026-01-01 00:01:30+00 claimed 0 2', 'limits: until a tick it is still there');
select is((select message_id from baton.send('q', '2', dedupe_key => 'k')), :am::bigint, 'limits: and holds its key');
savepoint at_limit;
select is((select outcome from baton.ack(:am, :last)), 'acked', 'limits: its holder may still ack it');
rollback to at_limit;
select is((select outcome from baton.extend(:am, :last)), 'extended', 'limits: or extend it');
select is(baton_test.dead_part(), null, 'limits: and then it lives');
rollback to at_limit;
select outcome from baton.park(:am, :last) \gset
select is((select lapses from baton.claim('q')), 2, 'limits: or give it back, which spares it the lapse');
rollback to at_limit;
select outcome from baton.fail(:am, :last, 'no', '0') \gset
select results_eq(
  $$select c.failures, c.lapses from baton.claim('q') as c$$, 'select 1, 2', 'limits: or fail, which counts apart'
);
rollback to at_limit;
select is(baton_test.dead_part(), 1, 'limits: the next tick ends it');
select results_eq(
  $$select
    d.message_id, d.queue_name, d.kind, d.payload, d.headers, d.dedupe_key, d.failures, d.lapses, d.last_error,
    d.claimed_at, d.created_at, d.died_at, d.reason
  from baton.dead_messages as d$$,
  format(
    $$values (
      %s::bigint, 'q', 'mail', '"held"'::jsonb, '{"h": 1}'::jsonb, 'k', 0, 3, null::text,
      timestamptz '2026-01-01 00:01:00+00', timestamptz '2026-01-01 00:00:00+00', timestamptz '2026-01-01 00:01:30+00',
      'lapses'
    )$$, :am
  ),
  'limits: with its history, the last lapse included'
);
select results_eq(
  $$select i.kind, i.at, i.queue_name, i.message_id, i.detail from baton.incidents as i$$,
  format($$select 'limit_reached', baton._now(), 'q', %s::bigint, '{"reason": "lapses"}'::jsonb$$, :am),
  'limits: and an incident'
);
select is((select outcome from baton.ack(:am, :last)), 'lost', 'limits: its last receipt is lost then');
select is((select outcome from baton.extend(:am, :last)), 'lost', 'limits: in every verb');
select is((select outcome from baton.park(:am, :last)), 'lost', 'limits: park');
select is((select outcome from baton.fail(:am, :last, 'x')), 'lost', 'limits: fail');
select is((select outcome from baton.send('q', '2', dedupe_key => 'k')), 'sent', 'limits: its key is free');
select is(baton_test.dead_part(), null, 'limits: a second tick finds nothing');

-- Lapses and failures apart

select baton_test.set_limits(3, 3) \gset
create function baton_test.suffer(queue_name text, message_id bigint, failures integer, lapses integer)
returns void
language plpgsql
volatile
as $$
declare
  v_delivery bigint;
begin
  for v_turn in 1..suffer.lapses loop
    perform c.message_id from baton.claim(suffer.queue_name, visibility => '0') as c;
  end loop;
  for v_turn in 1..suffer.failures loop
    select c.delivery into strict v_delivery from baton.claim(suffer.queue_name) as c;
    perform f.outcome from baton.fail(suffer.message_id, v_delivery, 'no', '0') as f;
  end loop;
end;
$$;
select message_id as m from baton.send('apart', '1') \gset
select baton_test.suffer('apart', :m, 2, 2) \gset
select is(baton_test.state(:m) like '% free 2 2', true, 'limits: failures and lapses count apart');
select is(baton_test.dead_part(), null, 'limits: two of each are not three of either');
select delivery as d from baton.claim('apart') \gset
select is((select outcome from baton.fail(:m, :d, 'no')), 'dead', 'limits: the third failure ends it');
select results_eq(
  format('select d.failures, d.lapses, d.reason from baton.dead_messages as d where d.message_id = %s', :m),
  $$values (3, 2, 'failures')$$, 'limits: as a failure, without a lapse more'
);

-- Lowered settings

select message_id as m from baton.send('lowered', '1') \gset
select baton_test.suffer('lowered', :m, 2, 0) \gset
select delivery as d from baton.claim('lowered') \gset
select outcome from baton.park(:m, :d, '10 seconds') \gset
select baton_test.set_limits(2, 3) \gset
select is(baton_test.dead_part(), null, 'limits: a lower limit does not reach what is not due');
select baton_test.advance('10 seconds') \gset
select is_empty($$select * from baton.claim('lowered')$$, 'limits: what is due is skipped');
select is(baton_test.dead_part(), 1, 'limits: and ended by a tick');
select results_eq(
  format('select d.failures, d.lapses, d.reason from baton.dead_messages as d where d.message_id = %s', :m),
  $$values (2, 0, 'failures')$$, 'limits: for its failures'
);
select baton_test.set_limits(3, 3) \gset
select message_id as m from baton.send('lowered', '1') \gset
select baton_test.suffer('lowered', :m, 0, 2) \gset
select delivery as d from baton.claim('lowered') \gset
select outcome from baton.park(:m, :d) \gset
select baton_test.set_limits(3, 2) \gset
select is(baton_test.dead_part(), 1, 'limits: the same for lapses');
select results_eq(
  format('select d.failures, d.lapses, d.reason from baton.dead_messages as d where d.message_id = %s', :m),
  $$values (0, 2, 'lapses')$$, 'limits: for its lapses, none more where nobody held it'
);

-- One lapse

select baton_test.set_limits(3, 1) \gset
select * from baton_test.hold('once') \gset o
select baton_test.advance('30 seconds') \gset
select is_empty($$select * from baton.claim('once')$$, 'limits: with a limit of one there is no second delivery');
select is(baton_test.dead_part(), 1, 'limits: and a tick ends it');

-- Between others

select baton_test.set_limits(3, 1) \gset
select outcome from baton.send_many(
  'many', (select jsonb_agg(jsonb_build_object('payload', 'poison')) from generate_series(1, 1200) as i)
) limit 1 \gset
select count(*) from baton.claim('many', max_messages => 1200) \gset
select baton_test.advance('30 seconds') \gset
select outcome from baton.send('many', '"healthy"') \gset
select results_eq(
  $$select c.payload #>> '{}' from baton.claim('many', max_messages => 10) as c$$, array['healthy'],
  'limits: messages at their limit do not stop others'
);
select is(baton_test.dead_part(), 1000, 'limits: a tick ends at most a thousand a queue');
select is(baton_test.dead_part(), 200, 'limits: the next one goes on');
select results_eq(
  $$select m.payload #>> '{}' from baton.messages as m where m.queue_name = 'many'$$, array['healthy'],
  'limits: and no others'
);
select baton_test.set_limits(3, 3) \gset

-- In many queues

insert into baton.queue_marks (queue_name, mark, marked_at, seen_at)
select 'wide ' || n, '-infinity', '-infinity', baton._now() from generate_series(1, 5) as n;
insert into baton.messages (queue_name, visible_at, created_at, failures)
select q.queue_name, baton._now(), baton._now(), 3
from baton.queue_marks as q
cross join generate_series(1, 600)
where q.queue_name like 'wide %';
select is(baton_test.dead_part(), 1200, 'limits: a tick ends with the queue in which it has ended a thousand');
select is(baton_test.dead_part(), 1200, 'limits: the next one begins there');
select is(baton_test.dead_part(), 600, 'limits: and none is forgotten');
select is_empty($$select from baton.messages as m where m.queue_name like 'wide %'$$, 'limits: all are ended');

-- The package's own

select baton_test.set_limits(3, 1) \gset
select message_id as m from baton._insert_keyed('baton.deliveries', '{}', null, 'key', null, null) \gset
select baton._register_queue('baton.deliveries', baton._now()) \g /dev/null
update baton.messages set claimed_at = baton._now(), delivery = 1, visible_at = baton._now() + interval '10 seconds' where message_id = :m;
select baton_test.advance('30 seconds') \gset
select count(*) from baton.remove_messages(array(select m.message_id from baton.messages as m)) \gset
select is(baton_test.dead_part(), null, 'limits: the package''s own messages never go to the dead');
select isnt(baton_test.state(:m), null, 'limits: they stay');

select * from finish();
rollback;
