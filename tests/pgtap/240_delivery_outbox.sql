\ir _begin.sql
\ir _starts.sql
select plan(70);

create function baton_test.deliveries(function_name text)
returns integer
language sql
stable
begin atomic
  select count(*)::integer
  from baton.messages as m
  where m.queue_name = 'baton.deliveries' and m.payload ->> 'function_name' = deliveries.function_name;
end;

create function baton_test.fail(message_id bigint, delivery bigint, error text, final boolean default false)
returns text
language sql
volatile
begin atomic
  select f.outcome from baton.fail(fail.message_id, fail.delivery, fail.error, final => fail.final) as f;
end;

insert into baton.secrets (secret_name, secret) values ('key', 'S3CR3T-oUtb0x');

-- What a delivery is
select baton.register_worker_function('orders', url => 'https://w.test/orders?x=1', secret_name => 'key') \g /dev/null
select e.outcome, e.invocation_id as orders, e.request_id as request, e.detail from baton.ensure_workers() as e \gset
select is(:'outcome'::text, 'reserved', 'outbox: without pg_net, auto is the outbox');
select results_eq(
  $$select m.message_id, m.queue_name, m.kind, m.headers, m.dedupe_key, m.visible_at, m.claimed_at from baton.messages as m$$,
  format($$values (%s::bigint, 'baton.deliveries', null::text, null::jsonb, %L, baton._now(), null::timestamptz)$$,
    :'request', e'orders\x1f' || :'orders'),
  'outbox: a message of baton.deliveries, due at once, its key the function and the invocation'
);
select is(
  (select m.payload from baton.messages as m),
  jsonb_build_object(
    'function_name', 'orders', 'url', 'https://w.test/orders?x=1', 'secret_name', 'key',
    'headers', jsonb_build_object('Content-Type', 'application/json', 'Idempotency-Key', :'orders'),
    'body', jsonb_build_object('invocation_id', :'orders', 'function_name', 'orders')
  ), 'outbox: its payload is the request, without the secret'
);
select results_eq(
  $$select f.invocation_transport, f.invocation_request_id from baton.worker_functions as f$$,
  format($$values ('outbox', %s::bigint)$$, :'request'), 'outbox: the function knows its message'
);
select baton.ensure_workers() from generate_series(1, 10) \g /dev/null
select is(baton_test.deliveries('orders'), 1, 'outbox: never a second request while a start is pending');
select baton.register_worker_function('mail') \g /dev/null
update baton.settings set base_url = 'https://base.test/functions/';
select baton.ensure_workers() \g /dev/null
select is(
  (select m.payload - 'body' - 'headers' from baton.messages as m where m.payload ->> 'function_name' = 'mail'),
  '{"function_name": "mail", "url": "https://base.test/functions/mail", "secret_name": null}',
  'outbox: a function without a url gets base_url, one slash, and its name'
);

-- A rolled-back reservation sends nothing
select baton.register_worker_function('undone', url => 'http://w.test') \g /dev/null
savepoint before;
select baton.ensure_workers() \g /dev/null
select baton_test.deliveries('undone') as during \gset
rollback to savepoint before;
select is(:'during' || ' ' || baton_test.deliveries('undone'), '1 0', 'outbox: a rolled-back reservation sends nothing');
select is(baton_test.state('undone'), 'retryable', 'outbox: and reserves nothing');
select baton.disable_worker_function('undone') \g /dev/null

-- Claiming
select results_eq(
  'select c.message_id, c.failures, c.lapses, c.visible_at from baton.claim_deliveries() as c',
  format($$values (%s::bigint, 0, 0, baton._now() + interval '30 seconds')$$, :'request'),
  'claim_deliveries: one by default, the longest due'
);
select results_eq(
  $$select c.payload ->> 'function_name' from baton.claim_deliveries(10) as c$$, $$values ('mail')$$,
  'claim_deliveries: what nobody else holds'
);
select is_empty('select * from baton.claim_deliveries(10)', 'claim_deliveries: nothing more');
select is_empty('select * from baton.claim_deliveries(0)', 'claim_deliveries: none wanted, none taken');
select is(baton_test.raised('select baton.claim_deliveries(-1)'), '22023 invalid_limit', 'claim_deliveries: a negative number');
select baton_test.advance('30 seconds') \g /dev/null
select c.message_id, c.delivery, c.lapses from baton.claim_deliveries(null) as c \gset
select is(:'message_id' || ' ' || :'lapses', :'request' || ' 1', 'claim_deliveries: again when the claim ran out, a lapse');
select is((select a.outcome from baton.ack(:'message_id', :'delivery') as a), 'acked', 'outbox: what is delivered is acked');
select is(baton_test.standing('orders'), 'pending', 'outbox: which proves nothing: the start is still pending');
select is(baton_test.accept('orders', :'orders', baton_test.worker(1)), 'accepted', 'outbox: until its worker is there');

-- A delivery that failed
select baton.register_worker_function('calls', url => 'http://w.test') \g /dev/null
select baton.ensure_workers() \g /dev/null
select is(
  (select m.payload ->> 'url' from baton.messages as m where m.payload ->> 'function_name' = 'calls'), 'http://w.test',
  'outbox: a url of its own comes before base_url'
);
select c.message_id, c.delivery from baton.claim_deliveries(10) as c where c.payload ->> 'function_name' = 'calls' \gset
select is(baton_test.fail(:'message_id', :'delivery', 'HTTP 503 from a proxy'), 'failed', 'fail: a delivery is tried again');
select is(baton_test.standing('calls'), 'pending', 'fail: the start stays pending');
select ok(
  (select m.visible_at between baton._now() + interval '0.8 seconds' and baton._now() + interval '1.2 seconds'
    from baton.messages as m where m.message_id = :'message_id'), 'fail: after the back-off'
);
select baton_test.advance('2 seconds') \g /dev/null
select c.message_id, c.delivery, c.failures from baton.claim_deliveries(10) as c where c.payload ->> 'function_name' = 'calls' \gset
select is(:'failures'::integer, 1, 'fail: it is counted');
select is(
  baton_test.fail(:'message_id', :'delivery', 'HTTP 401', true), 'dead', 'fail: a final failure ends the delivery'
);
select is(baton_test.standing('calls'), 'failed dismissed HTTP 401', 'fail: and dismisses the start, for its reason');
select is(baton_test.failed_starts('calls'), 1, 'fail: a failed start');
select is(baton_test.deliveries('calls'), 0, 'fail: the message is gone');
select is((select count(*)::integer from baton.dead_messages), 0, 'fail: and is no dead letter');
select is(baton_test.fail(:'message_id', :'delivery', 'HTTP 401', true), 'lost', 'fail: again: lost');
select is(baton_test.failed_starts('calls'), 1, 'fail: and nothing is counted twice');
select baton_test.advance('12 seconds') \g /dev/null
update baton.settings set max_failures = 2, backoff_base = '0', backoff_max = '0';
select baton.ensure_workers() \g /dev/null
select c.message_id, c.delivery from baton.claim_deliveries(10) as c where c.payload ->> 'function_name' = 'calls' \gset
select is(baton_test.fail(:'message_id', :'delivery', 'a'), 'failed', 'fail: below max_failures');
select c.message_id, c.delivery from baton.claim_deliveries(10) as c where c.payload ->> 'function_name' = 'calls' \gset
select is(baton_test.fail(:'message_id', :'delivery', 'b'), 'dead', 'fail: at max_failures');
select is(baton_test.standing('calls'), 'failed dismissed b', 'fail: which dismisses too');
update baton.settings set max_failures = 10, backoff_base = '1 second', backoff_max = '15 minutes';

-- A final failure that comes too late
select baton_test.advance('1 minute') \g /dev/null
select baton.ensure_workers() \g /dev/null
select baton_test.invocation('calls') as calls \gset
select c.message_id, c.delivery from baton.claim_deliveries(10) as c where c.payload ->> 'function_name' = 'calls' \gset
select baton_test.accept('calls', :'calls', baton_test.worker(2)) \g /dev/null
select is(baton_test.deliveries('calls'), 1, 'outbox: a delivery that a sender holds stays its own when the start is over');
select is(baton_test.fail(:'message_id', :'delivery', 'timeout', true), 'dead', 'fail: of a start that was accepted meanwhile');
select is(baton_test.standing('calls'), 'ready accept', 'fail: changes nothing of it');
select baton.register_worker_function('gone', url => 'http://w.test') \g /dev/null
select baton.ensure_workers() \g /dev/null
select c.message_id, c.delivery from baton.claim_deliveries(10) as c where c.payload ->> 'function_name' = 'gone' \gset
select baton.unregister_worker_function('gone') \g /dev/null
select is(baton_test.fail(:'message_id', :'delivery', 'x', true), 'dead', 'fail: of a function that was unregistered meanwhile');

-- Stale deliveries are dropped
select baton.disable_worker_function(f.function_name) from baton.worker_functions as f \g /dev/null
select baton.register_worker_function('stale', url => 'http://w.test') \g /dev/null
select baton.ensure_workers() \g /dev/null
select c.message_id, c.delivery from baton.claim_deliveries(10) as c where c.payload ->> 'function_name' = 'stale' \gset
select baton.extend(:'message_id', :'delivery', '61 seconds') \g /dev/null
select baton_test.advance('1 minute') \g /dev/null
select baton_test.reconcile('stale', baton_test.invocation('stale')) \g /dev/null
select baton_test.advance('2 seconds') \g /dev/null
select baton.ensure_workers() \g /dev/null
select is(baton_test.deliveries('stale'), 2, 'outbox: a delivery that its sender holds does not keep the next start from being sent');
select results_eq(
  $$select c.payload -> 'body' ->> 'invocation_id' from baton.claim_deliveries(1) as c$$,
  $$select baton_test.invocation('stale')::text$$,
  'claim_deliveries: of two, the one whose start is over is dropped, not handed out, though one was wanted'
);
select is(baton_test.deliveries('stale'), 1, 'claim_deliveries: it is gone');
select is((select count(*)::integer from baton.dead_messages), 0, 'claim_deliveries: and no dead letter');

-- At the deadline
select baton.register_worker_function('edge', url => 'http://w.test') \g /dev/null
select baton.ensure_workers() \g /dev/null
savepoint before;
select baton_test.advance('59.999999 seconds') \g /dev/null
select is(
  (select count(*)::integer from baton.claim_deliveries(10) as c where c.payload ->> 'function_name' = 'edge'), 1,
  'claim_deliveries: a microsecond before the deadline it is handed out'
);
rollback to savepoint before;
select baton_test.advance('60 seconds') \g /dev/null
select is(
  (select count(*)::integer from baton.claim_deliveries(10) as c where c.payload ->> 'function_name' = 'edge'), 0,
  'claim_deliveries: at the deadline it is dropped'
);
select is(baton_test.deliveries('edge'), 0, 'claim_deliveries: before anybody booked the expiry');

-- A sender that crashes again and again
update baton.settings set max_lapses = 2;
select baton.register_worker_function('lapses', url => 'http://w.test', pending_timeout => '10 minutes') \g /dev/null
select baton.ensure_workers() \g /dev/null
create function baton_test.lapse(times integer)
returns integer
language plpgsql
as $$
declare
  v_claimed integer := 0;
begin
  for i in 1..lapse.times loop
    perform baton_test.advance('30 seconds');
    v_claimed := v_claimed + (
      select count(*) from baton.claim_deliveries(10) as c where c.payload ->> 'function_name' = 'lapses'
    );
  end loop;
  return v_claimed;
end;
$$;
select is(baton_test.lapse(19), 19, 'claim_deliveries: a delivery has no limit of lapses');
select baton_test.advance('29 seconds') \g /dev/null
select baton.extend(m.message_id, m.delivery, '5 seconds') from baton.messages as m where m.payload ->> 'function_name' = 'lapses' \g /dev/null
select baton_test.advance('1 second') \g /dev/null
select baton.disable_worker_function('lapses') \g /dev/null
select is(baton_test.deliveries('lapses'), 1, 'outbox: its start is over while a sender holds it');
select is(baton_test.lapse(1), 0, 'claim_deliveries: then it is not handed out');
select is(baton_test.deliveries('lapses'), 0, 'claim_deliveries: but dropped');
update baton.settings set max_lapses = 20;

-- A sender that is down over three starts
select baton.register_worker_function('down', url => 'http://w.test') \g /dev/null
create procedure baton_test.lose_starts(times integer)
language plpgsql
as $$
begin
  for i in 1..lose_starts.times loop
    perform baton.ensure_workers();
    perform baton_test.advance('5 minutes');
  end loop;
  perform baton.ensure_workers();
end;
$$;
call baton_test.lose_starts(3);
select is(baton_test.failed_starts('down'), 3, 'outbox: a sender is down over three starts');
select is(baton_test.deliveries('down'), 1, 'outbox: the requests of the lost ones are gone');
select results_eq(
  $$select c.payload -> 'body' ->> 'invocation_id' from baton.claim_deliveries(10) as c
    where c.payload ->> 'function_name' = 'down'$$,
  $$select baton_test.invocation('down')::text$$, 'outbox: the fourth is delivered when it is back, once'
);

-- Whatever ends a pending start
create function baton_test.left_after(statement text)
returns integer
language plpgsql
as $$
declare
  v_name text := 'f' || md5(left_after.statement);
begin
  perform baton.register_worker_function(v_name, url => 'http://w.test');
  perform baton.ensure_workers();
  if baton_test.deliveries(v_name) <> 1 then
    raise exception 'no delivery to begin with';
  end if;
  execute left_after.statement using v_name, baton_test.invocation(v_name), gen_random_uuid();
  return baton_test.deliveries(v_name);
end;
$$;
select is(baton_test.left_after(e.statement), 0, 'outbox: a delivery goes when ' || e.what)
from (
  values
  ('its start is accepted', 'select baton.accept_worker_invocation($1, $2, $3)'),
  ('an old runtime registers', 'select baton.register_worker($3, $1), $2'),
  ('it is dismissed', 'select baton.dismiss_worker_invocation($1, $2, ''x''), $3'),
  ('its function is disabled', 'select baton.disable_worker_function($1), $2, $3'),
  ('its workers are deprecated', 'select baton.deprecate_workers($1), $2, $3'),
  ('its function is unregistered', 'select baton.unregister_worker_function($1), $2, $3'),
  ('reserve finds it expired', 'select baton_test.advance(''1 minute''), baton.reserve_worker_invocation($1), $2, $3'),
  (
    'reconcile finds it expired',
    'select baton_test.advance(''1 minute''), baton.reconcile_worker_invocation($1, $2), $3'
  ),
  (
    'accept finds it expired',
    'select baton_test.advance(''1 minute''), baton.accept_worker_invocation($1, $2, $3)'
  ),
  ('register_worker finds it expired', 'select baton_test.advance(''1 minute''), baton.register_worker($3, $1), $2'),
  (
    'register_worker_function finds it expired',
    'select baton_test.advance(''1 minute''), baton.register_worker_function($1), $2, $3'
  ),
  (
    'enable_worker_function finds it expired',
    'select baton_test.advance(''1 minute''), baton.enable_worker_function($1), $2, $3'
  )
) as e (what, statement);
select is(
  baton_test.left_after('select baton.reconcile_worker_invocation($1, $2), baton.reserve_worker_invocation($1), $3'), 1,
  'outbox: it does not go because its request arrived'
);

-- Users and the queue of deliveries
select is(
  baton_test.raised(u.statement), '22023 reserved_queue', 'outbox: a user''s message has no way in or out: ' || u.what
)
from (
  values
  ('send', 'select baton.send(''baton.deliveries'', ''{}'')'),
  ('send_many', 'select * from baton.send_many(''baton.deliveries'', ''[{"payload": {}}]'')'),
  ('claim', 'select baton.claim(''baton.deliveries'')'),
  ('register_worker_function', 'select baton.register_worker_function(''x'', queue_name => ''baton.deliveries'')')
) as u (what, statement);
select m.message_id from baton.messages as m where m.queue_name = 'baton.deliveries' limit 1 \gset
select is(
  (select r.outcome from baton.remove_messages(array[:message_id]) as r), 'unknown',
  'outbox: nor can remove_messages see it'
);

-- No secret
select is_empty($$select baton_test.relations_with('S3CR3T-oUtb0x')$$, 'outbox: the secret is in no table and no view');
select isnt_empty($$select baton_test.relations_with('w.test')$$, 'outbox: where a word that is there would be found');

select * from finish();
rollback;
