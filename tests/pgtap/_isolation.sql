-- At another isolation level, which the including file has set, after _begin.sql and _starts.sql.
select baton.send('work', '{}') \g /dev/null
insert into baton.worker_functions (function_name, queue_name) values ('orders', 'orders');
insert into baton.workers (worker_id, function_name, handshake, started_at, last_heartbeat_at)
values (baton_test.worker(1), 'orders', true, baton._now(), baton._now());
insert into baton.messages (queue_name, payload, visible_at, created_at)
values ('baton.deliveries', '{"function_name": "orders", "body": {"invocation_id": "00000000-0000-0000-0000-000000000009"}}',
  baton._now(), baton._now());

create function baton_test.fail_delivery(final boolean)
returns text
language sql
volatile
begin atomic
  select f.outcome
  from baton._claim('baton.deliveries', null, 1, null) as c
  cross join lateral baton.fail(c.message_id, c.delivery, 'x', final => fail_delivery.final) as f;
end;

select is(
  baton_test.raised(v.statement), '25001 wrong_isolation', 'isolation: refused: ' || v.statement
)
from (
  values
  ('select baton.register_worker_function(''orders'')'), ('select baton.unregister_worker_function(''orders'')'),
  ('select baton.enable_worker_function(''orders'')'), ('select baton.disable_worker_function(''orders'')'),
  ('select baton.deprecate_workers(''orders'')'), ('select baton.register_worker(gen_random_uuid(), ''orders'')'),
  ('select baton.reserve_worker_invocation(''orders'')'),
  ('select baton.reconcile_worker_invocation(''orders'', gen_random_uuid())'),
  ('select baton.accept_worker_invocation(''orders'', gen_random_uuid(), gen_random_uuid())'),
  ('select baton.dismiss_worker_invocation(''orders'', gen_random_uuid(), ''x'')'),
  ('select baton.ensure_workers()'), ('select baton.tick()'),
  ('select baton_test.fail_delivery(final => true)')
) as v (statement);
select is(baton_test.raised(v.statement), 'nothing', 'isolation: safe: ' || v.statement)
from (
  values
  ('select baton.heartbeat(baton_test.worker(1))'), ('select baton.stop_worker(baton_test.worker(1))'),
  ('select baton_test.fail_delivery(final => false)'), ('select baton.send(''work'', ''{}'')'), ('select baton.claim(''work'')'), ('select baton.claim_deliveries()'),
  ('select baton.health()'), ('select s from baton.worker_startup as s'), ('select baton.schedule()')
) as v (statement);
