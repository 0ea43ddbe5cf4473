\ir _begin.sql
\ir _starts.sql
select plan(49);

create function baton_test.ensured()
returns text
language sql
volatile
begin atomic
  select coalesce(string_agg(e.outcome || ' ' || e.function_name, ', ' order by e.nth), 'nothing')
  from baton.ensure_workers() with ordinality as e (outcome, function_name, invocation_id, request_id, detail, nth);
end;

-- Every row of the package with its version: a write, or the lock of a row, shows.
create function baton_test.versions()
returns text
language plpgsql
stable
as $$
declare
  v_relation regclass;
  v_versions text;
  v_all text := '';
begin
  for v_relation in
    select c.oid::regclass from pg_class as c where c.relnamespace = 'baton'::regnamespace and c.relkind = 'r' order by c.relname
  loop
    execute format('select string_agg(concat_ws('' '', r.ctid, r.xmin, r.cmin, r.xmax, r::text), ''; '' order by r.ctid) from %s as r', v_relation)
    into v_versions;
    v_all := v_all || v_relation::text || ': ' || coalesce(v_versions, '') || e'\n';
  end loop;
  return v_all;
end;
$$;

-- Nothing to do: rows that nobody has locked yet show a lock, too
savepoint before;
insert into baton.worker_functions (
  function_name, queue_name, url, start_mode, enabled, last_invoked_at, failed_starts, invocation_id, invocation_status,
  invocation_expires_at
)
select f.name, f.name, 'http://w.test', f.start_mode, f.enabled, baton._now(), f.failed_starts, gen_random_uuid(),
  f.status, baton._now() + f.expires_in
from (
  values
  ('healthy', 'http', true, 0, 'ready', interval '0'), ('pending', 'http', true, 0, 'pending', '1 microsecond'),
  ('throttled', 'http', true, 1, 'failed', '0'), ('disabled', 'http', false, 0, 'failed', '0'),
  ('process', 'process', true, 0, null, null)
) as f (name, start_mode, enabled, failed_starts, status, expires_in);
insert into baton.workers (worker_id, function_name, handshake, started_at, last_heartbeat_at)
values (baton_test.worker(1), 'healthy', true, baton._now() - interval '1 hour', baton._now());
select baton_test.versions() as before \gset
select baton_test.ensured() as answer \gset
select is(:'answer'::text, 'nothing', 'ensure_workers: healthy, pending, throttled, disabled and process functions');
select is(baton_test.versions(), :'before', 'ensure_workers: are neither written nor locked');
rollback to savepoint before;

-- Who is started
select is(baton_test.ensured(), 'nothing', 'ensure_workers: no functions, nothing to do');
update baton.settings set base_url = 'http://w.test';
select baton.register_worker_function('orders') \g /dev/null
select results_eq(
  'select e.outcome, e.function_name, e.invocation_id is not null, e.request_id is not null, e.detail from baton.ensure_workers() as e',
  $$values ('reserved', 'orders', true, true, null::text)$$, 'ensure_workers: a function without a worker'
);
select results_eq(
  $$select f.invocation_status, f.invocation_expires_at, f.last_invoked_at, f.failed_starts from baton.worker_functions as f$$,
  $$values ('pending', baton._now() + interval '60 seconds', baton._now(), 0)$$, 'ensure_workers: it reserves as reserve does'
);
select baton_test.invocation('orders') as orders \gset
select baton_test.versions() as before \gset
select is(
  (select string_agg(distinct baton_test.ensured(), '; ') from generate_series(1, 10)), 'nothing',
  'ensure_workers: ten calls do what one does'
);
select is(baton_test.versions(), :'before', 'ensure_workers: a pending start is no write and no lock');
select is(baton_test.invocation('orders'), :'orders', 'ensure_workers: it stays the one start');
select is(baton_test.accept('orders', :'orders', baton_test.worker(1)), 'accepted', 'ensure_workers: its worker is accepted');
select baton_test.versions() as before \gset
select is(baton_test.ensured(), 'nothing', 'ensure_workers: a healthy worker is there');
select is(baton_test.versions(), :'before', 'ensure_workers: and with nothing to do it writes nothing');
select baton.register_worker_function('batch', start_mode => 'process') \g /dev/null
select baton.register_worker_function('off') \g /dev/null
select baton.disable_worker_function('off') \g /dev/null
select baton_test.versions() as before \gset
select is(baton_test.ensured(), 'nothing', 'ensure_workers: process functions and disabled ones are not started');
select is(baton_test.versions(), :'before', 'ensure_workers: nor touched');

-- Edges of time
select baton_test.advance('14.999999 seconds') \g /dev/null
select is(baton_test.ensured(), 'nothing', 'ensure_workers: a microsecond before its heartbeat_timeout a worker counts');
select baton.heartbeat(baton_test.worker(1)) \g /dev/null
select baton_test.advance('15 seconds') \g /dev/null
select is(baton_test.ensured(), 'reserved orders', 'ensure_workers: at it, it is replaced');
select baton_test.advance('59.999999 seconds') \g /dev/null
select is(baton_test.ensured(), 'nothing', 'ensure_workers: a start is pending until its deadline');
select baton_test.advance('1 microsecond') \g /dev/null
select is(baton_test.ensured(), 'reserved orders', 'ensure_workers: at its deadline the next one follows');
select is(baton_test.failed_starts('orders'), 1, 'ensure_workers: the lost one counts');
select baton.register_worker_function('orders', pending_timeout => '1 second') \g /dev/null
select baton_test.advance('60 seconds') \g /dev/null
select is(baton_test.ensured(), 'reserved orders', 'ensure_workers: the second lost');
select baton_test.advance('1 second') \g /dev/null
select is(baton_test.ensured(), 'nothing', 'ensure_workers: expired, and throttled: nothing is started');
select is(baton_test.standing('orders'), 'failed expired', 'ensure_workers: but the expiry is booked');
select is(baton_test.failed_starts('orders'), 3, 'ensure_workers: once');
select baton_test.versions() as before \gset
select is(baton_test.ensured(), 'nothing', 'ensure_workers: still throttled');
select is(baton_test.versions(), :'before', 'ensure_workers: which is no write');
select baton_test.advance('46.999999 seconds') \g /dev/null
select is(baton_test.ensured(), 'nothing', 'ensure_workers: a microsecond before the throttle is over');
select baton_test.advance('1 microsecond') \g /dev/null
select is(baton_test.ensured(), 'reserved orders', 'ensure_workers: at its end the next start follows');
select baton_test.advance('1 second') \g /dev/null
select baton.register_worker(baton_test.worker(2), 'orders') \g /dev/null
update baton.worker_functions set invocation_status = 'pending' where function_name = 'orders';
select is(baton_test.ensured(), 'nothing', 'ensure_workers: a start that expired beside a healthy worker');
select is(baton_test.standing('orders'), 'failed expired', 'ensure_workers: is booked too');
select baton.disable_worker_function('orders') \g /dev/null

-- One whose workers others start by now
select baton.register_worker_function('moved') \g /dev/null
select is(baton_test.ensured(), 'reserved moved', 'ensure_workers: a start of a function');
select baton.register_worker_function('moved', start_mode => 'process') \g /dev/null
select baton_test.advance('60 seconds') \g /dev/null
select is(baton_test.ensured(), 'nothing', 'ensure_workers: that others start by now');
select is(baton_test.standing('moved'), 'failed expired', 'ensure_workers: is booked when it has expired');
select is_empty(
  $$select from baton.messages as m where m.payload ->> 'function_name' = 'moved'$$, 'ensure_workers: and its request goes'
);

-- The order
select baton.register_worker_function('never.b') \g /dev/null
select baton.register_worker_function('old', pending_timeout => '1 second') \g /dev/null
select baton.disable_worker_function('never.b') \g /dev/null
select is(baton_test.ensured(), 'reserved old', 'ensure_workers: the one that will have been invoked first');
select baton_test.advance('10 seconds') \g /dev/null
select baton.register_worker_function('new', pending_timeout => '1 second') \g /dev/null
select is(baton_test.ensured(), 'reserved new', 'ensure_workers: the one that will have been invoked second');
select baton.register_worker_function('never.a') \g /dev/null
select baton.enable_worker_function('never.b') \g /dev/null
select baton_test.advance('1 hour') \g /dev/null
select is(
  baton_test.ensured(), 'reserved never.a, reserved never.b, reserved old, reserved new',
  'ensure_workers: those never invoked first, by name, then the longest uninvoked'
);
select baton.disable_worker_function(f.function_name) from baton.worker_functions as f \g /dev/null

-- At most 100
select baton.register_worker_function(format('m%s', lpad(n.number::text, 3, '0'))) from generate_series(1, 101) as n (number) \g /dev/null
select is((select count(*)::integer from baton.ensure_workers()), 100, 'ensure_workers: at most 100 a call');
select is(baton_test.ensured(), 'reserved m101', 'ensure_workers: the rest at the next');
select is(baton_test.ensured(), 'nothing', 'ensure_workers: then nobody');
select baton.disable_worker_function(f.function_name) from baton.worker_functions as f \g /dev/null

-- Errors stay with their function, and don't hold the others up
update baton.settings set base_url = null;
select baton.register_worker_function('bad') \g /dev/null
select baton.register_worker_function('good', url => 'http://w.test') \g /dev/null
select is(baton_test.ensured(), 'error bad, reserved good', 'ensure_workers: one without a URL, and one that is well');
select is(
  baton_test.standing('bad'), 'failed error neither the function''s url nor settings.base_url is set',
  'ensure_workers: the error is booked'
);
select is(
  (select m.payload ->> 'function_name' from baton.messages as m where m.queue_name = 'baton.deliveries'), 'good',
  'ensure_workers: and nothing of its request is left'
);
select is(baton_test.reconcile('bad', baton_test.invocation('bad')), 'rejected error', 'ensure_workers: its id authorises nothing');
select baton.disable_worker_function('good') \g /dev/null
create procedure baton_test.errors(inout spacing interval[])
language plpgsql
as $$
begin
  for i in 1..7 loop
    spacing := spacing || (
      select r.retry_after from baton.reserve_worker_invocation('bad') as r where r.outcome = 'throttled'
    );
    perform baton_test.advance(spacing[i]);
    if baton_test.ensured() <> 'error bad' then
      raise exception 'not an error';
    end if;
  end loop;
end;
$$;
call baton_test.errors('{}') \gset
select is(
  :'spacing'::interval[], '{12 s, 24 s, 48 s, 96 s, 192 s, 5 min, 5 min}', 'ensure_workers: errors in a row are throttled like lost starts'
);
select is(baton_test.incidents('invocation_error', 'bad'), 8::bigint, 'ensure_workers: with an incident each');
select baton.register_worker_function('bad', url => 'http://w.test') \g /dev/null
select baton_test.advance('5 minutes') \g /dev/null
select is(baton_test.ensured(), 'reserved bad', 'ensure_workers: until the cause is mended');
select is(baton_test.failed_starts('bad'), 8, 'ensure_workers: the failures are kept until a worker comes');

-- A start beside which a worker appears
select baton.enable_worker_function('good') \g /dev/null
select baton.ensure_workers() \g /dev/null
select baton.register_worker(baton_test.worker(3), 'good') \g /dev/null
select baton_test.advance('14 seconds') \g /dev/null
select is(baton_test.ensured(), 'nothing', 'ensure_workers: an old runtime that registered is a worker like any');
select baton.stop_worker(baton_test.worker(3), draining => true) \g /dev/null
select is(baton_test.ensured(), 'reserved good', 'ensure_workers: while it drains its replacement starts');

select is(baton_test.incidents('function_locked'), 0::bigint, 'ensure_workers: nobody held a row here');

select * from finish();
rollback;
