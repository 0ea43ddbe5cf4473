\ir _begin.sql
\ir _starts.sql
select plan(47);

select is(
  (select r.outcome from baton.register_worker_function('orders') as r),
  'registered', 'register_worker_function: a name is enough'
);
select results_eq(
  $$select f.queue_name, f.url, f.secret_name, f.start_mode, f.enabled, f.require_handshake, f.debounce,
    f.pending_timeout, f.heartbeat_timeout, f.failed_starts, f.last_invoked_at, f.invocation_id
    from baton.worker_functions as f where f.function_name = 'orders'$$,
  $$values ('orders', null::text, null::text, 'http', true, false, interval '6 seconds', interval '60 seconds',
    interval '15 seconds', 0, null::timestamptz, null::uuid)$$,
  'register_worker_function: the defaults'
);
select baton.register_worker_function(
  'mail.v2', queue_name => 'mail', url => 'https://example.com/f?x=1', secret_name => 'key', start_mode => 'process',
  debounce => '1 second', pending_timeout => '2 minutes', heartbeat_timeout => '1 minute', require_handshake => true
) \g /dev/null
select results_eq(
  $$select f.queue_name, f.url, f.secret_name, f.start_mode, f.require_handshake, f.debounce, f.pending_timeout,
    f.heartbeat_timeout from baton.worker_functions as f where f.function_name = 'mail.v2'$$,
  $$values ('mail', 'https://example.com/f?x=1', 'key', 'process', true, interval '1 second', interval '2 minutes',
    interval '1 minute')$$,
  'register_worker_function: all that is given is stored'
);
select baton.register_worker_function('mail.v2') \g /dev/null
select results_eq(
  $$select f.queue_name, f.url, f.secret_name, f.start_mode, f.require_handshake, f.debounce, f.pending_timeout,
    f.heartbeat_timeout from baton.worker_functions as f where f.function_name = 'mail.v2'$$,
  $$values ('mail', 'https://example.com/f?x=1', 'key', 'process', true, interval '1 second', interval '2 minutes',
    interval '1 minute')$$,
  'register_worker_function: null keeps what is stored'
);
select baton.register_worker_function('mail.v2', start_mode => 'http', require_handshake => false) \g /dev/null
select results_eq(
  $$select f.queue_name, f.start_mode, f.require_handshake, f.debounce
    from baton.worker_functions as f where f.function_name = 'mail.v2'$$,
  $$values ('mail', 'http', false, interval '1 second')$$,
  'register_worker_function: only what is given is changed'
);

select baton.disable_worker_function('orders') \g /dev/null
select baton.register_worker_function('orders', url => 'http://w.test') \g /dev/null
select is(baton_test.state('orders'), 'disabled', 'register_worker_function: a disabled function stays disabled');
select baton.enable_worker_function('orders') \g /dev/null
select baton.register_worker_function('orders', url => 'http://w.test/2') \g /dev/null
select is(baton_test.state('orders'), 'retryable', 'register_worker_function: an enabled one stays enabled');

select baton_test.must_reserve('orders') as reserved \gset
select baton_test.advance('59.999999 seconds') \g /dev/null
select baton.register_worker_function('orders', pending_timeout => '1 second') \g /dev/null
select is(baton_test.standing('orders'), 'pending', 'register_worker_function: a pending start goes on');
select is(baton_test.invocation('orders'), :'reserved', 'register_worker_function: under the same id');
select baton_test.advance('1 microsecond') \g /dev/null
select baton.register_worker_function('orders') \g /dev/null
select is(baton_test.standing('orders'), 'failed expired', 'register_worker_function: a start past its deadline is booked');
select is(baton_test.failed_starts('orders'), 1, 'register_worker_function: as one failed start');

-- Names
select lives_ok(
  format('select baton.register_worker_function(%L)', repeat('n', 200)), 'register_worker_function: a name may have 200 characters'
);
select is(
  baton_test.raised(format('select baton.register_worker_function(%L)', n.name)), '22023 invalid_function_name',
  'register_worker_function: a name is refused that is ' || n.what
)
from (
  values
  (null, 'null'), ('', 'empty'), (repeat('n', 201), 'too long'), ('a b', 'of two words'), ('a/b', 'a path'),
  ('ä', 'not ASCII'), (e'a\n', 'ended by a newline'), ('a''b', 'with a quote')
) as n (name, what);
select is(
  baton_test.raised($$select baton.register_worker_function('baton.x')$$), '22023 reserved_queue',
  'register_worker_function: a name that would be a reserved queue needs another queue'
);
select is(
  baton_test.raised($$select baton.register_worker_function('baton.x', queue_name => 'x')$$), 'nothing',
  'register_worker_function: and may have that name then'
);
select baton.register_worker_function('baton.y', queue_name => 'y') \g /dev/null
select is(
  baton_test.raised($$select baton.register_worker_function('baton.y', debounce => '2 seconds')$$), 'nothing',
  'register_worker_function: once it has one it need not be said again'
);
select is(
  baton_test.raised($$select baton.register_worker_function('baton.y', queue_name => 'baton.y')$$), '22023 reserved_queue',
  'register_worker_function: nor may it become a reserved one'
);
select baton.unregister_worker_function('baton.y') \g /dev/null
select is(
  baton_test.raised(format('select baton.register_worker_function(%L, queue_name => %L)', 'f', n.name)), n.raised,
  'register_worker_function: queue ' || n.what
)
from (
  values
  ('baton.deliveries', '22023 reserved_queue', 'baton.deliveries is refused'),
  ('', '22023 invalid_name', 'of no name is refused'),
  (repeat('ä', 100), 'nothing', 'of 200 bytes is taken'),
  (repeat('ä', 100) || 'a', '22023 invalid_name', 'of 201 bytes is refused'),
  (e'a\x1f', '22023 invalid_name', 'with a control character is refused')
) as n (name, raised, what);
select is(
  baton_test.raised(format('select baton.register_worker_function(%L, secret_name => %L)', 'f', e'a\nb')),
  '22023 invalid_name', 'register_worker_function: a secret''s name has no control characters'
);

-- URLs
select is(
  baton_test.raised(format('select baton.register_worker_function(%L, url => %L)', 'f', u.url)), u.raised,
  'register_worker_function: url ' || u.what
)
from (
  values
  ('http://h', 'nothing', 'of a host alone is taken'),
  ('https://h:1/a/b?c=d', 'nothing', 'with port, path and query is taken'),
  ('', '22023 invalid_url', 'that is empty is refused'),
  ('h/a', '22023 invalid_url', 'without a scheme is refused'),
  ('ftp://h/a', '22023 invalid_url', 'of another scheme is refused'),
  ('http:///a', '22023 invalid_url', 'without a host is refused'),
  ('http://h/a b', '22023 invalid_url', 'with a space is refused'),
  (e'http://h/a\r\nX: y', '22023 invalid_url', 'with a line break is refused'),
  ('http://h/a#b', '22023 invalid_url', 'with a fragment is refused')
) as u (url, raised, what);

-- The rest
select is(
  baton_test.raised($$select baton.register_worker_function('f', start_mode => 'lambda')$$), '22023 invalid_choice',
  'register_worker_function: an unknown start_mode is refused'
);
select is(
  baton_test.raised(format('select baton.register_worker_function(%L, %I => %L)', 'f', t.argument, t.value)), t.raised,
  'register_worker_function: ' || t.argument || ' of ' || t.value
)
from (
  values
  ('debounce', '0.999999 seconds', '22023 too_small'),
  ('debounce', '1 second', 'nothing'),
  ('pending_timeout', '0', '22023 too_small'),
  ('pending_timeout', '-1 second', '22023 invalid_interval'),
  ('heartbeat_timeout', '0.5 seconds', '22023 too_small'),
  ('heartbeat_timeout', '11 years', '22023 invalid_interval')
) as t (argument, value, raised);
select is_empty(
  $$select f.function_name from baton.worker_functions as f where f.function_name not in ('orders', 'mail.v2')
    and octet_length(f.function_name) < 200$$,
  'register_worker_function: nothing is left of what was refused'
);

select * from finish();
rollback;
