\ir _begin.sql
\ir _queue.sql
\ir _tasks.sql
select plan(70);

-- What metrics() says of a sample; null if nothing.
create function baton_test.metric(sample text)
returns text
language sql
volatile
begin atomic
  select string_agg(substring(l.line from length(metric.sample) + 2), '; ')
  from regexp_split_to_table(baton.metrics(), e'\n') as l (line)
  where starts_with(l.line, metric.sample || ' ');
end;
create function baton_test.incidents_counted(kind text)
returns text
language sql
volatile
begin atomic
  select baton_test.metric(format('baton_incidents_total{kind="%s"}', incidents_counted.kind));
end;

-- The form

select is(right(baton.metrics(), 6), e'\n# EOF', 'form: it ends in # EOF');
select is(
  (select string_agg(l.line, ' ') from regexp_split_to_table(baton.metrics(), e'\n') as l (line) where l.line ~ ' (NaN|)$'), null,
  'form: every sample has a value'
);
select is(
  baton_test.metric(format('baton_info{version="%s"}', baton.version())), '1', 'form: the version is a label'
);
select is(
  (
    select array_agg(split_part(l.line, ' ', 3)) from regexp_split_to_table(baton.metrics(), e'\n') as l (line)
    where l.line ~ '^# TYPE '
  ),
  (select array_agg(f.name order by f.nth) from baton._metric_families() as f), 'form: each family once, with or without samples'
);
select is(
  (
    select string_agg(l.line, '; ') from regexp_split_to_table(baton.metrics(), e'\n') as l (line)
    where l.line ~ '^# (TYPE|UNIT).*_seconds'
  ),
  '# TYPE baton_last_tick_timestamp_seconds gauge; # UNIT baton_last_tick_timestamp_seconds seconds; '
  '# TYPE baton_queue_oldest_ready_age_seconds gauge; # UNIT baton_queue_oldest_ready_age_seconds seconds',
  'form: what is in seconds says so'
);
select baton.send(e'"\\q"', '1') \g /dev/null
select is(baton_test.metric(e'baton_queue_messages{queue="\\"\\\\q\\"",state="ready"}'), '1', 'form: labels are escaped');

-- Counters

select is(
  (
    select string_agg(i.kind, ' ' order by i.kind collate "C") from unnest(baton._incident_kinds()) as i (kind)
  ),
  (
    select string_agg(m.found[1], ' ' order by m.found[1] collate "C")
    from pg_attribute as a
    cross join lateral regexp_matches(col_description(a.attrelid, a.attnum), '(\w+)(?=(?:, \w+)*: )', 'g') as m (found)
    where a.attrelid = 'baton.incident_log'::regclass and a.attname = 'kind'
  ),
  'counters: the kinds of incidents are those that incident_log explains'
);
select isnt_empty($$
  select m.found[1] from pg_proc as p
  cross join lateral regexp_matches(p.prosrc, '_incident\(\s*[^,]+,\s*''(\w+)''', 'g') as m (found)
  where p.pronamespace = 'baton'::regnamespace and m.found[1] = any (baton._incident_kinds())
$$, 'counters: (the functions name kinds)');
select is_empty($$
  select p.proname, m.found[1] from pg_proc as p
  cross join lateral regexp_matches(p.prosrc, '_incident\(\s*[^,]+,\s*''(\w+)''', 'g') as m (found)
  where p.pronamespace = 'baton'::regnamespace and m.found[1] !~ '_$' and m.found[1] <> all (baton._incident_kinds())
$$, 'counters: and no others');
select is(baton_test.incidents_counted(k.kind), '0', 'counters: from the first moment on there is ' || k.kind)
from unnest(baton._incident_kinds()) as k (kind);
select is(baton_test.metric('baton_awaits_total'), '0', 'counters: awaits too');
select is(baton_test.metric('baton_backstops_armed_total'), '0', 'counters: and backstops');

-- An owned recovery under the run message, a lost receipt
select m as rm, d as rd from baton_test.inline('r') \gset
select baton_test.advance('30 seconds') \g /dev/null
select m as r2m, d as r2d, e as r2e from baton_test.replay('r') \gset
select is(baton_test.dispatch('r', :r2e), 'execute s/0#2', '(an owned recovery)');
select is(baton_test.incidents_counted('owned_recovery'), '1', 'counters: an owned recovery');
select is(baton_test.dispatch('r', :r2e), 'running s/0#2', '(asked again)');
select is(baton_test.incidents_counted('owned_recovery'), '1', 'counters: once');
select outcome from baton.extend(:rm, :rd) \g /dev/null
select is(baton_test.incidents_counted('lost'), '1', 'counters: a lost receipt');

-- Two owned recoveries and two backstops in one statement each
select m as bm, d as bd, e as be from baton_test.made('b', 2) \gset
select baton_test.dispatch('b', :be, 2), baton_test.finish('b', :be) \g /dev/null
select m as b2m, d as b2d, e as b2e from baton_test.again('b', '1 hour') \gset
select is(baton_test.dispatch('b', :b2e), 'backstop s/0#1 00:14:20, backstop s/1#1 00:14:20', '(two backstops)');
select is(baton_test.metric('baton_backstops_armed_total'), '2', 'counters: backstops');
select count(*) from generate_series(1, 5) as i, lateral baton_test.dispatch('b', :b2e) \g /dev/null
select is(baton_test.metric('baton_backstops_armed_total'), '2', 'counters: wakes that share one arm none');
select baton_test.finish('b', :b2e) \g /dev/null
select baton_test.advance('30 seconds') \g /dev/null
select m as b3m, d as b3d, e as b3e from baton_test.replay('b') \gset
select is(baton_test.dispatch('b', :b3e), 'execute s/0#2, execute s/1#2', '(two owned recoveries)');
select is(baton_test.incidents_counted('owned_recovery'), '3', 'counters: several in one statement');

-- Awaits and a takeover
select m as hm, d as hd from baton_test.inline('h') \gset
update baton.settings set inline_ownership = false;
select m as h2m, d as h2d, e as h2e from baton_test.again('h', '1 hour') \gset
select is(baton_test.dispatch('h', :h2e), 'enqueue s/0#1', '(a message beside the owner)');
update baton.settings set inline_ownership = true;
select m as h3m, d as h3d from baton_test.take_task('h') \gset
select is(baton_test.begin(:h3m, :h3d), 'await 00:00:30', '(an await)');
select is(baton_test.metric('baton_awaits_total'), '1', 'counters: an await');
select baton_test.advance('30 seconds') \g /dev/null
select m as h4m, d as h4d from baton_test.take_task('h') \gset
select is(baton_test.begin(:h4m, :h4d), 'execute s/0#2', '(a takeover)');
select is(baton_test.incidents_counted('takeover'), '1', 'counters: a takeover');
select is(baton_test.incidents_counted('owned_recovery'), '3', 'counters: is no owned recovery');

-- Nothing is lost when tick adds up, when incidents go, or in between
create function baton_test.counters()
returns text
language sql
volatile
begin atomic
  select string_agg(l.line, ' ')
  from regexp_split_to_table(baton.metrics(), e'\n') as l (line)
  where l.line ~ '^baton_\w+_total' and l.line !~ ' 0$';
end;
select baton_test.counters() as counters \gset
select count(*) from baton.tick() \g /dev/null
select is_empty($$select t.tally_id from baton.tallies as t$$, 'counters: tick adds up what was noted');
select is((select sum(o.total) from baton.totals as o), 8::numeric, 'counters: (8 happenings)');
select is(baton_test.counters(), :'counters', 'counters: and changes none');
select count(*) from baton.prune('0') \g /dev/null
select is_empty($$select i.incident_id from baton.incidents as i$$, 'counters: (the incidents are pruned)');
select is(baton_test.counters(), :'counters', 'counters: nor does it change one when incidents go');
select baton._tally('lost'), baton._tally('never_heard_of') \g /dev/null
select is(baton_test.incidents_counted('lost'), '2', 'counters: what follows is added');
select is(baton_test.incidents_counted('never_heard_of'), '1', 'counters: whatever its kind');
select count(*) from baton.tick() \g /dev/null
select is(baton_test.incidents_counted('lost'), '2', 'counters: to what was there');
insert into baton.tallies (kind) select 'await' from generate_series(1, 10001) as i;
select is((select t.changed from baton.tick() as t where t.part = 'totals'), 10000, 'counters: a tick adds up 10,000 at the most');
select is(baton_test.metric('baton_awaits_total'), '10002', 'counters: which nobody sees');

-- Gauges: what the views say

select is(baton_test.metric('baton_last_tick_timestamp_seconds'), extract(epoch from baton._now())::text, 'gauges: the last tick');
update baton.state set last_tick_at = null;
select is(baton_test.metric('baton_last_tick_timestamp_seconds'), '0', 'gauges: none yet');
select is(baton_test.metric('baton_health_findings{severity="critical",finding="tick"}'), '1', 'gauges: which is a finding');
select count(*) from baton.tick() \g /dev/null
select is(baton_test.metric('baton_health_findings{severity="critical",finding="tick"}'), null, 'gauges: until there is');
select is(
  (select count(*)::integer from regexp_matches(baton.metrics(), 'baton_health_findings\{[^\n]*"ok"', 'g')), 0, 'gauges: what is ok is no finding'
);

delete from baton.messages;
delete from baton.runs;
delete from baton.tasks;
select baton.send('mail', '1') from generate_series(1, 5) \g /dev/null
select baton.send('mail', '1', delay => '1 hour') from generate_series(1, 2) \g /dev/null
select count(*) from baton.claim('mail', max_messages => 3) \g /dev/null
select * from baton_test.hold('mail') \gset m
select outcome from baton.fail(:mm, :md, 'x', final => true) \g /dev/null
select baton_test.advance('10 seconds') \g /dev/null
select is(
  (select string_agg(m.found[1], ' ') from regexp_matches(baton.metrics(), '\nbaton_queue_(\w+\{queue="mail"[^\n]*)', 'g') as m (found)),
  'messages{queue="mail",state="delayed"} 2 messages{queue="mail",state="in_flight"} 3 messages{queue="mail",state="ready"} 2 '
  'oldest_ready_age_seconds{queue="mail"} 10.000000 dead_messages{queue="mail"} 1',
  'gauges: a queue'
);

create function baton_test.gauges(name text)
returns text
language sql
volatile
begin atomic
  select string_agg(concat(m.found[1], m.found[2]), ', ')
  from regexp_matches(baton.metrics(), e'\n' || gauges.name || e'(?:\\{([^\n]*)\\})?( [^\n]*)', 'g') as m (found)
  where m.found[2] <> ' 0';
end;
select is(baton_test.gauges('baton_functions'), null, 'gauges: no function');
select baton.register_worker_function('orders', url => 'http://w.test'), baton.register_worker_function('batch', start_mode => 'process') \g /dev/null
select baton.dismiss_worker_invocation('orders', r.invocation_id, 'no') from baton.reserve_worker_invocation('orders') as r \g /dev/null
select is(baton_test.gauges('baton_functions'), 'state="process" 1, state="throttled" 1', 'gauges: functions by startup state');
select is(baton_test.gauges('baton_function_failed_starts'), 'function="orders" 1', 'gauges: starts that failed in a row');
select baton.register_worker(baton_test.worker(n), 'batch') from generate_series(1, 5) as n \g /dev/null
select baton.heartbeat(baton_test.worker(1), 'listening'), baton.heartbeat(baton_test.worker(2), 'polling'),
  baton.heartbeat(baton_test.worker(3), 'polling'), baton.stop_worker(baton_test.worker(5), draining => true) \g /dev/null
select is(
  baton_test.gauges('baton_workers'),
  'function="batch",control="listening" 1, function="batch",control="off" 1, function="batch",control="polling" 2',
  'gauges: healthy workers by control'
);
select baton_test.advance('15 seconds') \g /dev/null
select is(baton_test.gauges('baton_workers'), null, 'gauges: no longer than they are healthy');

select baton_test.start('asleep') \g /dev/null
select m as lm, d as ld, e as le from baton_test.made('lives') \gset
select baton_test.dispatch('lives', :le) \g /dev/null
select m as gm, d as gd from baton_test.inline('gone') \gset
select outcome from baton.release_task('gone', 's', 0) \g /dev/null
select m as g2m, d as g2d, a as g2a from baton_test.started('gone') \gset
select m as tm, d as td from baton_test.inline('taken') \gset
update baton.messages set claimed_at = null where message_id = :tm;
select is(baton_test.gauges('baton_open_runs'), 'status="pending" 1, status="running" 3', 'gauges: open runs');
select is(baton_test.gauges('baton_started_tasks'), 'owner="none" 1, owner="run" 1, owner="task" 1', 'gauges: started tasks by owner');
select is(baton_test.gauges('baton_replays'), 'alive="true" 1', 'gauges: replays');
select baton_test.advance('30 seconds') \g /dev/null
select is(baton_test.gauges('baton_replays'), 'alive="false" 1', 'gauges: that are lost');
insert into baton.runs (run_id, workflow_name, queue_name, status, created_at, ended_at)
select n::text, 'w', 'q', case when n <= 300 then 'suspended' else 'completed' end, baton._now(), case when n > 300 then baton._now() end
from generate_series(1, 996) as n;
select is(baton_test.gauges('baton_suspended_runs_estimate'), null, 'gauges: suspended runs, before any ANALYZE');
analyze baton.runs;
select is(baton_test.gauges('baton_suspended_runs_estimate'), ' 300', 'gauges: and after it');
select is(baton_test.gauges('baton_open_runs'), 'status="pending" 1, status="running" 3', 'gauges: which are not counted');
select * from finish();
rollback;
