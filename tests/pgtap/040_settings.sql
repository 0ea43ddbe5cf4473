\ir _begin.sql
\ir _starts.sql
select plan(77);

-- The defaults
select results_eq(
  $$select s.transport, s.base_url, s.request_timeout, s.max_payload_bytes, s.visibility, s.backoff_base, s.backoff_max,
    s.max_failures, s.max_lapses, s.message_notify, s.control_notify, s.recovery, s.inline_ownership, s.inline_lease,
    s.silent_worker_timeout, s.retention
    from baton.settings as s$$,
  $$values ('auto', null::text, interval '5 seconds', 1048576, interval '30 seconds', interval '1 second',
    interval '15 minutes', 10, 20, false, true, true, true, interval '860 seconds', interval '1 hour', null::interval)$$,
  'settings: one row, with the defaults'
);

-- What they may be
select is(
  baton_test.raised(format('update baton.settings set %s', c.change)),
  case when c.constraint_name is null then 'nothing' else '23514 settings_' || c.constraint_name || '_check' end,
  'settings: ' || c.change || case when c.constraint_name is null then ' is taken' else ' is refused' end
)
from (
  values
  ('transport = ''pg_net''', null), ('transport = ''outbox''', null), ('transport = ''smtp''', 'transport'),
  ('transport = ''''', 'transport'),
  ('base_url = ''http://h''', null), ('base_url = ''https://h:8000/a/b/''', null), ('base_url = ''ftp://h''', 'base_url'),
  ('base_url = ''h''', 'base_url'), ('base_url = ''http://''', 'base_url'), ('base_url = ''''', 'base_url'),
  ('base_url = ''http://h/?a=b''', 'base_url'), ('base_url = ''http://h/#a''', 'base_url'),
  ('base_url = ''http://h/a b''', 'base_url'), ('base_url = e''http://h/\n''', 'base_url'),
  ('request_timeout = ''1 millisecond''', null), ('request_timeout = ''10 minutes''', null),
  ('request_timeout = ''0''', 'request_timeout'), ('request_timeout = ''-1 second''', 'request_timeout'),
  ('request_timeout = ''0.999 milliseconds''', 'request_timeout'),
  ('request_timeout = ''10 minutes 1 microsecond''', 'request_timeout'),
  ('max_payload_bytes = 1024', null), ('max_payload_bytes = 1023', 'max_payload_bytes'),
  ('visibility = ''1 second''', null), ('visibility = ''0.999999 seconds''', 'visibility'),
  ('visibility = ''10 years''', null), ('visibility = ''11 years''', 'visibility'),
  ('backoff_base = ''0''', null), ('backoff_base = ''-1 second''', 'backoff'), ('backoff_base = ''16 minutes''', 'backoff'),
  ('backoff_base = ''15 minutes''', null), ('backoff_max = ''0.5 seconds''', 'backoff'), ('backoff_max = ''11 years''', 'backoff'),
  ('max_failures = 1', null), ('max_failures = 0', 'max_failures'), ('max_lapses = 1', null), ('max_lapses = 0', 'max_lapses'),
  ('inline_ownership = false', null), ('inline_lease = ''1 second''', null), ('inline_lease = ''10 years''', null),
  ('inline_lease = ''0.999999 seconds''', 'inline_lease'), ('inline_lease = ''-1 second''', 'inline_lease'),
  ('inline_lease = ''11 years''', 'inline_lease'),
  ('silent_worker_timeout = ''1 second''', null), ('silent_worker_timeout = ''0''', 'silent_worker_timeout'),
  ('silent_worker_timeout = ''11 years''', 'silent_worker_timeout'),
  ('retention = ''30 days''', null), ('retention = ''0''', null), ('retention = ''10 years''', null),
  ('retention = ''-1 second''', 'retention'), ('retention = ''11 years''', 'retention'),
  ('singleton = false', 'singleton'), ('message_notify = true', null), ('control_notify = false', null), ('recovery = false', null)
) as c (change, constraint_name);
select is(
  baton_test.raised(format('update baton.settings set %I = null', a.attname)),
  case when a.attname in ('base_url', 'retention') then 'nothing' else '23502' end,
  'settings: ' || a.attname || case when a.attname in ('base_url', 'retention') then ' may be null' else ' is never null' end
)
from pg_attribute as a
where a.attrelid = 'baton.settings'::regclass and a.attnum > 0 and not a.attisdropped
order by a.attnum;

-- One row
insert into baton.settings (transport) values ('outbox');
select results_eq(
  'select s.transport, s.visibility from baton.settings as s', $$values ('outbox', interval '30 seconds')$$,
  'settings: a second row takes the place of the first, as when a dump is restored'
);
update baton.settings set visibility = '1 minute';
insert into baton.settings default values;
select results_eq(
  'select s.transport, s.visibility from baton.settings as s', $$values ('auto', interval '30 seconds')$$,
  'settings: also one of defaults only'
);
update baton.state set cron_purged_runid = 7;
insert into baton.state (last_tick_at) values ('2026-01-01');
select results_eq(
  'select s.last_tick_at, s.cron_purged_runid from baton.state as s', $$values (timestamptz '2026-01-01', 0::bigint)$$,
  'state: the same'
);
select is(baton_test.raised('update baton.state set singleton = false'), '23514 state_singleton_check', 'state: there is one row');

-- A change holds from the next call on
update baton.settings set visibility = '2 minutes';
select baton.send('work', '{}') \g /dev/null
select is(
  (select c.visible_at from baton.claim('work') as c), baton._now() + interval '2 minutes',
  'settings: a change holds from the next call on'
);

select * from finish();
rollback;
