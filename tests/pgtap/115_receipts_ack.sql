\ir _begin.sql
\ir _queue.sql
select plan(27);

select * from baton_test.hold('q') \gset a
select is((select outcome from baton.ack(:am, :ad)), 'acked', 'ack: a current receipt removes the message');
select is(baton_test.state(:am), null, 'ack: it is gone');
select is((select count(*) from baton.dead_messages), 0::bigint, 'ack: and not among the dead');
select is((select outcome from baton.ack(:am, :ad)), 'lost', 'ack: a second time it is lost');

-- A claim that ran out

select * from baton_test.hold('q') \gset b
select baton_test.advance('30 seconds') \gset
select is((select outcome from baton.ack(:bm, :bd)), 'acked', 'ack: at its deadline a claim still acks');
select * from baton_test.hold('q') \gset b
select baton_test.advance('1 year') \gset
select is((select outcome from baton.ack(:bm, :bd)), 'acked', 'ack: and a year later, while nobody has acted');

-- Nobody's receipt

select outcome, message_id as n from baton.send('new', '1') \gset
select is((select outcome from baton.ack(:n, 1)), 'lost', 'ack: a message that was never claimed has no receipt');
select is((select outcome from baton.ack(:n, null)), 'lost', 'ack: nor is null one');
select * from baton_test.hold('q') \gset c
select is((select outcome from baton.ack(:cm, null)), 'lost', 'ack: a null delivery is lost');
select is((select outcome from baton.ack(null, :cd)), 'lost', 'ack: a null message is lost');
select is((select outcome from baton.ack(null, null)), 'lost', 'ack: nulls are lost');
select is((select outcome from baton.ack(-1, :cd)), 'lost', 'ack: an unknown message is lost');
select is(baton_test.incidents('lost'), 0::bigint, 'ack: no incident where no other delivery has the row');
select is(
  (select outcome from baton.ack(delivery => :cd, message_id => :cm)), 'acked',
  'ack: its arguments have names'
);

-- A spent receipt

select * from baton_test.hold('q') \gset d
select outcome from baton.park(:dm, :dd) \gset
select is((select outcome from baton.ack(:dm, :dd)), 'lost', 'ack: park spends a receipt');
select delivery as dd from baton.claim('q') \gset
select outcome from baton.fail(:dm, :dd, 'no', '0') \gset
select is((select outcome from baton.ack(:dm, :dd)), 'lost', 'ack: fail spends it');
select delivery as dd from baton.claim('q') \gset
select outcome from baton.fail(:dm, :dd, 'no', final => true) \gset
select is((select outcome from baton.ack(:dm, :dd)), 'lost', 'ack: a dead message has none');
select outcome from baton.redrive(array[:dm]) \gset
select is((select outcome from baton.ack(:dm, :dd)), 'lost', 'ack: nor one that was redriven');
select is(baton_test.incidents('lost'), 0::bigint, 'ack: still no incident');
select is(baton_test.state(:dm) like '% free 0 0', true, 'ack: a lost one changes nothing');

-- Another's

select * from baton_test.hold('taken') \gset e
select baton_test.advance('30 seconds') \gset
select delivery as taker, visible_at as until from baton.claim('taken') \gset
select is((select outcome from baton.ack(:em, :ed)), 'lost', 'ack: once another claim has the message it is lost');
select is(
  baton_test.state(:em), format('%s claimed 0 1', :'until'::timestamptz), 'ack: and the other keeps it'
);
select results_eq(
  $$select i.at, i.queue_name, i.message_id, i.detail from baton.incidents as i where i.kind = 'lost'$$,
  format(
    $$select baton._now(), 'taken', %s::bigint, jsonb_build_object('verb', 'ack', 'delivery', %s)$$, :em, :ed
  ),
  'ack: an incident tells of it, and of no receipt that is current'
);
select outcome from baton.park(:em, :taker) \gset
select is((select outcome from baton.ack(:em, :ed)), 'lost', 'ack: lost too after the other gave it back');
select is(baton_test.incidents('lost'), 1::bigint, 'ack: which is no other incident: a receipt is lost once');
select delivery as last from baton.claim('taken') \gset
select outcome from baton.ack(:em, :taker) \gset
select results_eq(
  $$select i.message_id, i.detail ->> 'delivery' from baton.incidents as i where i.kind = 'lost' order by i.incident_id$$,
  format('values (%1$s::bigint, %2$L), (%1$s, %3$L)', :em, :'ed', :'taker'), 'ack: another receipt is'
);
select is((select outcome from baton.ack(:em, :last)), 'acked', 'ack: the last delivery acks');

select * from finish();
rollback;
