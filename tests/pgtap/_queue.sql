-- What the files about messages share, those of runs and tasks too.

-- The receipts of an array: id, delivery, id, delivery, …
create function baton_test.receipts(variadic numbers bigint[])
returns jsonb
language sql
immutable
begin atomic
  select coalesce(
    jsonb_agg(
      jsonb_build_object('message_id', r.numbers[i.nth], 'delivery', r.numbers[i.nth + 1]) order by i.nth
    ), '[]'
  )
  from (select receipts.numbers) as r
  cross join lateral generate_series(1, cardinality(r.numbers), 2) as i (nth);
end;

-- How a message stands: when it is due (or its claim runs out), claimed or not, failures, lapses; null: it is gone.
create function baton_test.state(message_id bigint)
returns text
language sql
stable
begin atomic
  select format(
    '%s %s %s %s', m.visible_at, case when m.claimed_at is null then 'free' else 'claimed' end, m.failures, m.lapses
  )
  from baton.messages as m
  where m.message_id = state.message_id;
end;

create function baton_test.incidents(kind text)
returns bigint
language sql
stable
begin atomic
  select count(*) from baton.incidents as i where i.kind = incidents.kind;
end;

create function baton_test.set_limits(failures integer, lapses integer)
returns void
language sql
volatile
begin atomic
  update baton.settings as s set max_failures = set_limits.failures, max_lapses = set_limits.lapses;
end;

-- An interval that only PostgreSQL 17 and newer can write is refused by a verb there, by the cast before.
create function baton_test.refuses_infinity()
returns text
language sql
stable
begin atomic
  select case when current_setting('server_version_num')::integer >= 170000 then '22023' else '22007' end;
end;

-- The SQLSTATE that a statement ends with; what it did is undone if that is an error.
create function baton_test.sqlstate_of(statement text)
returns text
language plpgsql
volatile
as $$
begin
  execute sqlstate_of.statement;
  return '00000';
exception
  when others then
    return sqlstate;
end;
$$;

-- Names that every verb refuses, and some that look odd and are taken. Length is in bytes.
create function baton_test.bad_names(bytes integer)
returns table (name text)
language sql
immutable
begin atomic
  select repeat('x', bad_names.bytes + 1)
  union all
  select repeat('ä', bad_names.bytes / 2) || 'x'
  union all
  select ''
  union all
  select 'a' || chr(c.code) from unnest(array[1, 9, 10, 13, 31, 127, 128, 159]) as c (code);
end;

create function baton_test.odd_names(bytes integer)
returns table (name text)
language sql
immutable
begin atomic
  select repeat('x', odd_names.bytes)
  union all
  select repeat('ä', odd_names.bytes / 2)
  union all
  select e'~ /"''%\\ü\u00a0\u20ac';
end;

-- Sends a message into an otherwise idle queue and claims it.
create function baton_test.hold(queue_name text, dedupe_key text default null, out m bigint, out d bigint)
language plpgsql
volatile
as $$
begin
  perform baton.send(hold.queue_name, '"held"', dedupe_key => hold.dedupe_key, kind => 'mail', headers => '{"h": 1}');
  select c.message_id, c.delivery into strict hold.m, hold.d from baton.claim(hold.queue_name) as c;
end;
$$;

create function baton_test.park(message_id bigint, delivery bigint, delay interval default '0', force boolean default false)
returns text
language sql
volatile
begin atomic
  select concat_ws(' ', p.outcome, p.visible_at - baton._now())
  from baton.park(park.message_id, park.delivery, park.delay, park.force) as p;
end;

create function baton_test.fail_message(
  message_id bigint, delivery bigint, delay interval default '1 minute', final boolean default false,
  force boolean default false
)
returns text
language sql
volatile
begin atomic
  select concat_ws(' ', f.outcome, f.visible_at - baton._now())
  from baton.fail(
    fail_message.message_id, fail_message.delivery, 'broken', fail_message.delay, fail_message.final, fail_message.force
  ) as f;
end;

-- The messages of a run, the oldest first: key, time until it is due or runs out, whether it is claimed.
create function baton_test.messages(run_id text)
returns text
language sql
stable
begin atomic
  select string_agg(
    concat_ws(
      ' ', coalesce(replace(right(m.dedupe_key, -length(m.run_id) - 1), e'\x1f', '/'), 'keyless'),
      m.visible_at - baton._now(), case when m.claimed_at is not null then 'claimed' end
    ),
    ', ' order by m.message_id
  )
  from baton.message_overview as m
  where m.run_id = messages.run_id;
end;

create function baton_test.wedged()
returns text
language sql
volatile
begin atomic
  select string_agg(concat_ws(' ', w.run_id, w.reason), ', ' order by w.run_id) from baton.wedged_runs as w;
end;

-- The findings of that name: severity, subject, detail.
create function baton_test.findings(finding text)
returns text
language sql
volatile
begin atomic
  select string_agg(concat_ws(' ', h.severity || ':', h.subject, h.detail), '; ' order by h.subject)
  from baton.health() as h
  where h.finding = findings.finding;
end;
