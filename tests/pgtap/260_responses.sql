\ir _begin.sql
\ir _starts.sql
\ir ../standin/pg_net.sql
select plan(76);

create function baton_test.read_responses()
returns integer
language sql
volatile
begin atomic
  select coalesce(sum(t.changed), 0)::integer from baton.tick() as t where t.part = 'responses';
end;

-- Requests a start, has it answered, and tells what has become of it at the next tick.
create function baton_test.answered(
  status_code integer, error_msg text default null, timed_out boolean default false, name text default null
)
returns text
language plpgsql
as $$
declare
  v_name text := coalesce(answered.name, 'f' || md5(concat_ws(' ', answered.status_code, answered.error_msg)));
  v_request_id bigint;
begin
  perform baton.register_worker_function(v_name, url => 'http://w.test');
  perform baton.ensure_workers();
  select f.invocation_request_id into strict v_request_id from baton.worker_functions as f where f.function_name = v_name;
  insert into net._http_response (id, status_code, error_msg, timed_out)
  values (v_request_id, answered.status_code, answered.error_msg, answered.timed_out);
  perform baton_test.read_responses();
  return baton_test.standing(v_name);
end;
$$;

-- Before any start
select is(baton_test.read_responses(), 0, 'responses: none is awaited');

-- Status codes
select is(
  baton_test.answered(c.code), case when c.fails then 'failed dismissed HTTP ' || c.code else 'pending' end,
  'responses: HTTP ' || c.code || case when c.fails then ' dismisses' else ' proves nothing' end
)
from (
  values
  (200, false), (202, false), (204, false), (301, false), (399, false),
  (400, true), (401, true), (403, true), (404, true), (407, true), (408, false), (409, false), (410, true), (413, true),
  (429, true), (499, true), (500, true), (501, true), (502, false), (503, true), (504, false), (505, true),
  (519, true), (520, false), (521, false), (522, false), (523, false), (524, false), (525, true), (526, true), (599, true)
) as c (code, fails);

-- Errors of the transport, in the words of old and new libcurl
select is(
  baton_test.answered(null, e.error, e.timed_out), case when e.fails then 'failed dismissed ' || e.error else 'pending' end,
  'responses: "' || e.error || case when e.fails then '" dismisses' else '" proves nothing' end
)
from (
  values
  ('Couldn''t connect to server', false, true),
  ('Could not connect to server', false, true),
  ('Couldn''t resolve host name', false, true),
  ('Could not resolve hostname', false, true),
  ('Couldn''t resolve proxy name', false, true),
  ('Timeout of 5000 ms reached. Total time: 5001.1 ms (DNS time: 1 ms, TCP/SSL handshake time: 0 ms)', true, false),
  ('Timeout was reached', null, false),
  ('Server returned nothing (no headers, no data)', false, false),
  ('Failed sending data to the peer', false, false),
  ('Failure when receiving data from the peer', null, false),
  ('Transferred a partial file', false, false),
  ('SSL connect error', false, false),
  ('The server said: could not connect to server', false, false)
) as e (error, timed_out, fails);
select is(baton_test.answered(null, null, true, 'silent'), 'pending', 'responses: a time-out without a word proves nothing');

-- What is booked
select is(baton_test.failed_starts(f.function_name), 1, 'responses: a dismissal is a failed start')
from baton.worker_functions as f where f.invocation_detail = 'HTTP 404';
select results_eq(
  $$select i.kind, i.detail from baton.incident_log as i where i.detail ->> 'reason' = 'HTTP 404'$$,
  $$values ('invocation_dismissed', '{"reason": "HTTP 404", "failed_starts": 1}'::jsonb)$$, 'responses: with an incident'
);
select is(
  baton_test.reserve(f.function_name), 'throttled 00:00:12', 'responses: the next start waits for the throttle, not for the deadline'
) from baton.worker_functions as f where f.invocation_detail = 'HTTP 404';
select is((select count(*)::integer from net._http_response), 0, 'responses: the package''s own are deleted when they are read');
select is(
  (select count(*)::integer from baton.worker_functions as f where f.invocation_request_id is not null), 0,
  'responses: and are awaited no longer'
);

-- Others' responses
select baton.register_worker_function('orders', url => 'http://w.test') \g /dev/null
select baton.ensure_workers() \g /dev/null
select f.invocation_request_id as request from baton.worker_functions as f where f.function_name = 'orders' \gset
select net.http_get('http://elsewhere.test') as foreign_request \gset
insert into net._http_response (id, status_code) values (:foreign_request, 404), (:request - 1, 500);
select is(baton_test.read_responses(), 0, 'responses: those of other requests are not read');
select is(baton_test.standing('orders'), 'pending', 'responses: and mean nothing');
select is((select count(*)::integer from net._http_response), 2, 'responses: nor deleted');
delete from net._http_response;

-- A start that is over
select baton_test.accept('orders', baton_test.invocation('orders'), baton_test.worker(1)) \g /dev/null
insert into net._http_response (id, status_code) values (:request, 500);
select is(baton_test.read_responses(), 1, 'responses: one that comes after the acceptance is read');
select is(baton_test.standing('orders'), 'ready accept', 'responses: and changes nothing');
select is((select count(*)::integer from net._http_response), 0, 'responses: but goes');
select baton.register_worker_function('mail', url => 'http://w.test') \g /dev/null
select baton.ensure_workers() \g /dev/null
select f.invocation_request_id as request from baton.worker_functions as f where f.function_name = 'mail' \gset
select baton.dismiss_worker_invocation('mail', baton_test.invocation('mail'), 'first') \g /dev/null
insert into net._http_response (id, status_code) values (:request, 500);
select is(baton_test.read_responses(), 1, 'responses: one that comes after a dismissal');
select is(
  baton_test.standing('mail') || ' ' || baton_test.failed_starts('mail'), 'failed dismissed first 1',
  'responses: is no second failure'
);

-- Only the current pending one
select baton.register_worker_function('again', url => 'http://w.test') \g /dev/null
select baton.ensure_workers() \g /dev/null
select f.invocation_request_id as request from baton.worker_functions as f where f.function_name = 'again' \gset
select baton_test.advance('1 minute') \g /dev/null
select baton.ensure_workers() \g /dev/null
insert into net._http_response (id, status_code) values (:request, 404);
select baton_test.read_responses() \g /dev/null
select is(baton_test.standing('again'), 'pending', 'responses: one to the start before does not harm the current one');
delete from net._http_response;
select f.invocation_request_id as request from baton.worker_functions as f where f.function_name = 'again' \gset
savepoint before;
select baton_test.advance('59.999999 seconds') \g /dev/null
insert into net._http_response (id, status_code) values (:request, 404);
select baton._read_responses(baton._now()) \g /dev/null
select is(baton_test.standing('again'), 'failed dismissed HTTP 404', 'responses: a microsecond before the deadline it dismisses');
rollback to savepoint before;
select baton_test.advance('60 seconds') \g /dev/null
insert into net._http_response (id, status_code) values (:request, 404);
select baton._read_responses(baton._now()) \g /dev/null
select is(baton_test.standing('again'), 'failed expired', 'responses: at the deadline the start has expired');
select is(baton_test.failed_starts('again'), 2, 'responses: and counts once');

-- A manual start asks nothing of the transport
select baton.register_worker_function('manual', url => 'http://w.test') \g /dev/null
select baton_test.must_reserve('manual') \g /dev/null
insert into net._http_response (id, status_code) select max(q.id), 404 from net.http_request_queue as q;
select baton._read_responses(baton._now()) \g /dev/null
select is(baton_test.standing('manual'), 'pending', 'responses: a manual start awaits none');
delete from net._http_response;

-- Never answered
select baton_test.advance('1 hour') \g /dev/null
select baton.ensure_workers() \g /dev/null
select isnt(f.invocation_request_id, null, 'responses: an answer is awaited')
from baton.worker_functions as f where f.function_name = 'again';
select baton_test.advance('59.999999 seconds') \g /dev/null
select baton._read_responses(baton._now()) \g /dev/null
select isnt(f.invocation_request_id, null, 'responses: until the deadline')
from baton.worker_functions as f where f.function_name = 'again';
select baton_test.advance('1 microsecond') \g /dev/null
select baton._read_responses(baton._now()) \g /dev/null
select is(f.invocation_request_id, null, 'responses: and then no longer')
from baton.worker_functions as f where f.function_name = 'again';

-- pg_net began anew after a crash: its tables are empty, its ids start at 1
select baton_test.advance('1 hour') \g /dev/null
select baton.ensure_workers() \g /dev/null
select max(f.invocation_request_id) as highest, min(f.invocation_request_id) as lowest from baton.worker_functions as f \gset
select ok(:lowest < :highest, 'responses: several are awaited');
select setval('net.http_request_queue_id_seq', :highest) \g /dev/null
select baton._read_responses(baton._now()) \g /dev/null
select is(
  (select max(f.invocation_request_id) from baton.worker_functions as f), :highest::bigint,
  'responses: while pg_net stands at the highest id, all are awaited'
);
select setval('net.http_request_queue_id_seq', :highest - 1) \g /dev/null
insert into net._http_response (id, status_code) values (:lowest, 404);
select baton._read_responses(baton._now()) \g /dev/null
select is(
  (select count(*)::integer from baton.worker_functions as f where f.invocation_request_id is not null), 0,
  'responses: once it stands below it, all are forgotten'
);
select is(
  (select count(*)::integer from baton.worker_functions as f where f.invocation_detail = 'HTTP 404' and f.invocation_status = 'failed'
    and f.last_invoked_at = baton._now()), 0,
  'responses: before any answer is read, which may be to somebody else''s request'
);
select is((select count(*)::integer from net._http_response), 1, 'responses: and that answer stays');
select results_eq(
  $$select i.detail from baton.incident_log as i where i.kind = 'request_ids_forgotten'$$,
  format($$values (jsonb_build_object('pg_net_is_at', %s))$$, :highest - 1), 'responses: an incident tells'
);
delete from net._http_response;
select baton_test.advance('1 hour') \g /dev/null
select setval('net.http_request_queue_id_seq', 1, false) \g /dev/null
delete from baton.worker_functions where function_name <> 'again';
select baton.ensure_workers() \g /dev/null
select is(
  (select f.invocation_request_id from baton.worker_functions as f), 1::bigint, 'responses: the first id of all is awaited'
);
select setval('net.http_request_queue_id_seq', 1, false) \g /dev/null
select baton._read_responses(baton._now()) \g /dev/null
select is(
  (select f.invocation_request_id from baton.worker_functions as f), null,
  'responses: it too is forgotten when pg_net began anew'
);

-- No pg_net
drop schema net cascade;
select is(baton._read_responses(baton._now()), 0, 'responses: without pg_net there are none');

select * from finish();
rollback;
