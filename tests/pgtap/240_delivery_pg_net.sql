\ir _begin.sql
\ir _starts.sql
select plan(46);

-- Without pg_net
select is(baton._transport(), 'outbox', 'transport: auto, and no pg_net: the outbox');
update baton.settings set transport = 'pg_net';
select baton.register_worker_function('early', url => 'http://w.test/early') \g /dev/null
select results_eq(
  'select e.outcome, e.function_name, e.detail from baton.ensure_workers() as e',
  $$values ('error', 'early', 'pg_net is not in this database')$$, 'transport: pg_net is wanted and is not there: an error'
);
update baton.settings set transport = 'auto';
create schema net;
select is(baton._transport(), 'outbox', 'transport: another schema net is not pg_net');
drop schema net;
select baton.disable_worker_function('early') \g /dev/null

-- With it
\ir ../standin/pg_net.sql
select is(baton._transport(), 'pg_net', 'transport: auto, and pg_net: pg_net');
update baton.settings set transport = 'outbox';
select is(baton._transport(), 'outbox', 'transport: the setting decides');
update baton.settings set transport = 'auto';

create function baton_test.queued(function_name text)
returns integer
language sql
stable
begin atomic
  select count(*)::integer
  from net.http_request_queue as q
  where convert_from(q.body, 'UTF8')::jsonb ->> 'function_name' = queued.function_name;
end;

insert into baton.secrets (secret_name, secret) values
('good', 'S3CR3T-good'), ('empty', ''), ('blank', '   '), ('lines', e'S3CR3T-two\nlines'), ('cr', e'S3CR3T-cr\r');

-- The request
select baton.register_worker_function('orders', url => 'https://w.test/orders?x=1', secret_name => 'good') \g /dev/null
select e.outcome, e.invocation_id as orders, e.request_id as request, e.detail from baton.ensure_workers() as e \gset
select is(:'outcome'::text, 'reserved', 'pg_net: a start is requested');
select results_eq(
  $$select q.id, q.method::text, q.url, q.timeout_milliseconds from net.http_request_queue as q$$,
  format($$values (%s::bigint, 'POST', 'https://w.test/orders?x=1', 5000)$$, :'request'),
  'pg_net: a POST to the url, with request_timeout'
);
select is(
  (select q.headers from net.http_request_queue as q),
  jsonb_build_object('Content-Type', 'application/json', 'Idempotency-Key', :'orders', 'Authorization', 'Bearer S3CR3T-good'),
  'pg_net: the secret is in Authorization, the invocation in Idempotency-Key'
);
select is(
  (select convert_from(q.body, 'UTF8')::jsonb from net.http_request_queue as q),
  jsonb_build_object('invocation_id', :'orders', 'function_name', 'orders'), 'pg_net: the body names both'
);
select results_eq(
  $$select f.invocation_transport, f.invocation_request_id from baton.worker_functions as f where f.function_name = 'orders'$$,
  format($$values ('pg_net', %s::bigint)$$, :'request'), 'pg_net: the function knows its request'
);
select is_empty('select m.message_id from baton.messages as m', 'pg_net: nothing goes to the outbox');
select baton.ensure_workers() from generate_series(1, 10) \g /dev/null
select is(baton_test.queued('orders'), 1, 'pg_net: never a second request while a start is pending');
select baton.register_worker_function('open') \g /dev/null
update baton.settings set base_url = 'http://base.test', request_timeout = '1.5 seconds';
select baton.ensure_workers() \g /dev/null
select results_eq(
  $$select q.url, q.timeout_milliseconds, q.headers ? 'Authorization'
    from net.http_request_queue as q order by q.id desc limit 1$$,
  $$values ('http://base.test/open', 1500, false)$$, 'pg_net: base_url, another timeout, and no secret'
);
update baton.settings set base_url = null;

-- A rolled-back reservation sends nothing
select baton.register_worker_function('undone', url => 'http://w.test/undone') \g /dev/null
savepoint before;
select baton.ensure_workers() \g /dev/null
select baton_test.queued('undone') as during \gset
rollback to savepoint before;
select is(:'during' || ' ' || baton_test.queued('undone'), '1 0', 'pg_net: a rolled-back reservation sends nothing');
select baton.disable_worker_function('undone') \g /dev/null

-- What can't be requested fails alone
select baton.register_worker_function('a.good', url => 'http://w.test/a', secret_name => 'good') \g /dev/null
select baton.register_worker_function('b.' || s.name, url => 'http://w.test/b', secret_name => s.name)
from unnest(array['none', 'empty', 'blank', 'lines', 'cr']) as s (name) \g /dev/null
select baton.register_worker_function('c.nourl') \g /dev/null
select baton.register_worker_function('d.badurl', url => 'http://w.test:port/', secret_name => 'good') \g /dev/null
select baton.register_worker_function('e.good', url => 'http://w.test/e') \g /dev/null
create temporary table answers on commit drop as select e.* from baton.ensure_workers() as e;
select results_eq(
  $$select a.outcome, a.function_name, a.request_id is not null, a.detail from answers as a order by a.function_name$$,
  $$values
    ('reserved', 'a.good', true, null),
    ('error', 'b.blank', false, 'secret blank is missing or empty in baton.secrets'),
    ('error', 'b.cr', false, 'secret cr in baton.secrets has more than one line'),
    ('error', 'b.empty', false, 'secret empty is missing or empty in baton.secrets'),
    ('error', 'b.lines', false, 'secret lines in baton.secrets has more than one line'),
    ('error', 'b.none', false, 'secret none is missing or empty in baton.secrets'),
    ('error', 'c.nourl', false, 'neither the function''s url nor settings.base_url is set'),
    ('error', 'd.badurl', false,
      'invalid URL "http://w.test:port/": Port number was not a decimal number between 0 and 65535'),
    ('reserved', 'e.good', true, null)$$,
  'ensure_workers: each function that can''t be requested gives an error, the others start in the same call'
);
select is(
  (select count(*)::integer from net.http_request_queue as q where q.url like 'http://w.test/b%'), 0,
  'pg_net: without its secret nothing is sent'
);
select is(
  baton_test.standing('b.none'), 'failed error secret none is missing or empty in baton.secrets',
  'ensure_workers: the error is booked on its function'
);
select is(
  (select string_agg(distinct baton_test.failed_starts(a.function_name)::text, ' ') from answers as a where a.outcome = 'error'), '1',
  'ensure_workers: as a failed start each'
);
select is(
  (select a.invocation_id from answers as a where a.function_name = 'b.none'), baton_test.invocation('b.none'),
  'ensure_workers: the row names the invocation that failed'
);
select is_empty('select e.function_name from baton.ensure_workers() as e', 'ensure_workers: an error is throttled');
select is(baton_test.state('b.none'), 'throttled', 'ensure_workers: as any failed start');
select is(baton_test.reserve('b.none'), 'throttled 00:00:12', 'ensure_workers: the throttle is doubled');
select results_eq(
  $$select i.function_name, i.detail ->> 'reason' from baton.incident_log as i
    where i.kind = 'invocation_error' and i.function_name = 'b.lines'$$,
  $$values ('b.lines', 'secret lines in baton.secrets has more than one line')$$, 'ensure_workers: an incident tells'
);
insert into baton.secrets (secret_name, secret) values ('none', 'S3CR3T-late');
select baton_test.advance('12 seconds') \g /dev/null
select is(
  (select e.outcome from baton.ensure_workers() as e where e.function_name = 'b.none'), 'reserved',
  'ensure_workers: once the cause is mended it is started'
);
select is(
  (select q.headers ->> 'Authorization' from net.http_request_queue as q order by q.id desc limit 1)
    in ('Bearer S3CR3T-late'), true, 'pg_net: with the secret of that moment'
);

-- An error text with the secret in it
insert into baton.secrets (secret_name, secret) values ('quoted', 'S3CR3T-"q\"');
select baton.register_worker_function('leak', url => 'http://w.test/leak', secret_name => 'good') \g /dev/null
select baton.register_worker_function('leak.quoted', url => 'http://w.test/leak', secret_name => 'quoted') \g /dev/null
savepoint before;
create or replace function net.http_post(
  url text, body jsonb default '{}', params jsonb default '{}', headers jsonb default '{}', timeout_milliseconds integer default 5000
)
returns bigint
language plpgsql
as $$
begin
  raise exception 'can''t send % %', http_post.headers ->> 'Authorization', http_post.headers -> 'Authorization';
end;
$$;
select results_eq(
  $$select e.function_name, e.outcome, e.detail from baton.ensure_workers() as e where e.function_name like 'leak%'
    order by e.function_name$$,
  $$values
    ('leak', 'error', 'can''t send Bearer *** "Bearer ***"'), ('leak.quoted', 'error', 'can''t send Bearer *** "Bearer ***"')$$,
  'pg_net: a secret in an error is struck out, as it is and as JSON'
);
select is(
  (select count(*)::integer from baton.incident_log as i where i.detail::text like '%S3CR3T%'), 0,
  'pg_net: also in the incident'
);
rollback to savepoint before;
select baton.disable_worker_function('leak'), baton.disable_worker_function('leak.quoted') \g /dev/null

-- A crash that is replaced by an error leaves both traces
select baton.register_worker_function('crash', url => 'http://w.test/crash', secret_name => 'good') \g /dev/null
select baton_test.start('crash', baton_test.worker(1)) \g /dev/null
select baton_test.advance('15 seconds') \g /dev/null
delete from baton.secrets where secret_name = 'good';
select baton.ensure_workers() \g /dev/null
select is(baton_test.failed_starts('crash'), 2, 'ensure_workers: a crash and then an error are two failed starts');
select is(
  baton_test.incidents('start_crashed', 'crash') || ' ' || baton_test.incidents('invocation_error', 'crash'), '1 1',
  'ensure_workers: with an incident each'
);
insert into baton.secrets (secret_name, secret) values ('good', 'S3CR3T-good');

-- Another database
select set_config('pg_net.database_name', 'elsewhere', true) \g /dev/null
select is(baton._transport(), 'outbox', 'transport: auto, and pg_net works for another database: the outbox');
update baton.settings set transport = 'pg_net';
select baton.register_worker_function('far', url => 'http://w.test/far') \g /dev/null
select is(
  (select e.detail from baton.ensure_workers() as e where e.function_name = 'far'),
  'pg_net works for database elsewhere, not for ' || current_database(),
  'transport: where it is wanted all the same: an error, not a request that is never sent'
);
select is(baton_test.queued('far'), 0, 'transport: nothing is sent');
select set_config('pg_net.database_name', current_database(), true) \g /dev/null
select baton_test.advance('12 seconds') \g /dev/null
select baton.ensure_workers() \g /dev/null
select is(baton_test.queued('far'), 1, 'transport: once it works for this one it is');

-- Without USAGE on its schema
create role baton_test_owner;
grant usage on schema baton_test, tap to baton_test_owner;
revoke usage on schema net from public;
grant execute on all functions in schema baton to baton_test_owner;
grant usage on schema baton to baton_test_owner;
set local role baton_test_owner;
select tap.is(
  baton._pg_net_problem(), 'pg_net can''t be used: role baton_test_owner has no USAGE on schema net',
  'transport: pg_net without USAGE is a problem that is told'
);
reset role;
grant usage on schema net to public;

-- Supabase Vault
\ir ../standin/vault.sql
select vault.create_secret('S3CR3T-vault', 'good') \g /dev/null
select vault.create_secret('', 'empty') \g /dev/null
select vault.create_secret(e'S3CR3T-v\nv', 'lines') \g /dev/null
select baton.register_worker_function('v.' || s.name, url => 'http://w.test/v', secret_name => s.name)
from unnest(array['good', 'none', 'empty', 'lines']) as s (name) \g /dev/null
select results_eq(
  $$select e.outcome, e.function_name, e.detail from baton.ensure_workers() as e
    where e.function_name like 'v.%' order by e.function_name$$,
  $$values
    ('error', 'v.empty', 'secret empty is missing or empty in Supabase Vault'),
    ('reserved', 'v.good', null),
    ('error', 'v.lines', 'secret lines in Supabase Vault has more than one line'),
    ('error', 'v.none', 'secret none is missing or empty in Supabase Vault')$$,
  'Vault: where it is, secrets are its own'
);
select is(
  (select q.headers ->> 'Authorization' from net.http_request_queue as q
    where q.url = 'http://w.test/v' order by q.id desc limit 1), 'Bearer S3CR3T-vault',
  'Vault: the decrypted secret, and not the one of baton.secrets'
);
insert into vault.secrets (name, secret) values ('corrupt', '!!!');
select baton.register_worker_function('v.corrupt', url => 'http://w.test/v', secret_name => 'corrupt') \g /dev/null
select baton.register_worker_function('v.zeal', url => 'http://w.test/v', secret_name => 'good') \g /dev/null
select results_eq(
  $$select e.outcome, e.function_name, left(e.detail, 49) from baton.ensure_workers() as e
    where e.function_name in ('v.corrupt', 'v.zeal')$$,
  $$values
    ('error', 'v.corrupt', 'secret corrupt can''t be read from Supabase Vault:'), ('reserved', 'v.zeal', null)$$,
  'Vault: one that can''t be decrypted keeps its own function from being started, and no other'
);
select results_eq(
  $$select h.severity, left(h.detail, 49) from baton.health() as h where h.finding = 'credential' and h.subject = 'v.corrupt'$$,
  $$values ('critical', 'secret corrupt can''t be read from Supabase Vault:')$$, 'Vault: and health tells'
);
grant usage on schema vault to baton_test_owner;
set local role baton_test_owner;
select tap.is(
  (select c.problem from baton._credential('good') as c),
  'secret good can''t be read from Supabase Vault: permission denied for view decrypted_secrets',
  'Vault: without SELECT is a problem that is told'
);
reset role;
revoke usage on schema vault from baton_test_owner;
set local role baton_test_owner;
select tap.is(
  (select c.problem from baton._credential('good') as c),
  'Supabase Vault can''t be used: role baton_test_owner has no USAGE on schema vault',
  'Vault: without USAGE is a problem that is told'
);
reset role;

-- Whatever was asked
select is_empty($$select baton_test.relations_with('S3CR3T')$$, 'secrets: none is in a table or a view');
select isnt_empty($$select baton_test.relations_with('w.test')$$, 'secrets: where a word that is there would be found');
select is(
  (select count(*)::integer from baton.health() as h where h::text like '%S3CR3T%'), 0, 'secrets: none is in health()'
);
select is((select count(*)::integer from answers as a where a::text like '%S3CR3T%'), 0, 'secrets: none is in an answer');

-- A function that is disabled while it waits
select baton.register_worker_function('late', url => 'http://w.test/late') \g /dev/null
select baton.ensure_workers() \g /dev/null
select baton_test.invocation('late') as late \gset
select baton.disable_worker_function('late') \g /dev/null
select is(baton_test.queued('late'), 1, 'pg_net: a request that was handed over is not taken back');
select is(baton_test.reconcile('late', :'late'), 'rejected disabled', 'pg_net: when it arrives it is refused');

select * from finish();
rollback;
