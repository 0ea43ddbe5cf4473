\ir _begin.sql
\ir _queue.sql
\ir _tasks.sql
select plan(14);

create function baton_test.beat(number integer, control text default null)
returns text
language sql
volatile
begin atomic
  select h.outcome from baton.heartbeat(baton_test.worker(beat.number), beat.control) as h;
end;

select baton.register_worker_function(f.name, start_mode => 'process') from unnest(array['a', 'b']) as f (name) \g /dev/null
select baton.register_worker(baton_test.worker(n), case when n < 4 then 'a' else 'b' end) from generate_series(1, 4) as n \g /dev/null
select is(baton_test.findings('polling'), null, 'health: workers that run no bodies need not hear anything');
select is(baton_test.findings('no_cancellation'), null, 'health: nor ask');

-- Polling

select baton_test.beat(1, 'listening'), baton_test.beat(4, 'listening') \g /dev/null
select is(baton_test.findings('polling'), null, 'health: who listens is no finding');
select baton_test.beat(1, 'polling'), baton_test.beat(2, 'polling') \g /dev/null
select is(
  baton_test.findings('polling'),
  'warning: a 2 of 3 workers don''t hear the control channel: their bodies are stopped at the next time that they ask',
  'health: who polls is one'
);
update baton.settings set control_notify = false;
select is(baton_test.findings('polling'), null, 'health: not where nothing is sent');
update baton.settings set control_notify = true;
select baton.stop_worker(baton_test.worker(2)) \g /dev/null
select matches(baton_test.findings('polling'), '1 of 2 workers', 'health: a worker that has stopped does not count');
select baton_test.advance('15 seconds') \g /dev/null
select is(baton_test.findings('polling'), null, 'health: nor one that is silent');
select baton_test.beat(1), baton_test.beat(3), baton_test.beat(4) \g /dev/null
select matches(baton_test.findings('polling'), '1 of 2 workers', 'health: (heard again)');

-- Off

select m as m, d as d, e as e from baton_test.made('r', worker_id => baton_test.worker(3)) \gset
select is(baton_test.findings('no_cancellation'), null, 'health: off, and nothing is started yet');
select baton_test.dispatch('r', :e), baton_test.finish('r', :e) \g /dev/null
select is(
  baton_test.findings('no_cancellation'), 'warning: a 1 of 2 workers run bodies, with control off: nobody asks these to stop',
  'health: off, with a body that runs'
);
select baton_test.beat(3, 'listening') \g /dev/null
select is(baton_test.findings('no_cancellation'), null, 'health: not with one that hears');
select baton_test.beat(3, 'off'), baton_test.beat(4, 'polling') \g /dev/null
select is(
  (select string_agg(concat_ws(' ', h.subject, h.finding), ', ' order by h.subject, h.finding) from baton.health() as h
    where h.finding in ('polling', 'no_cancellation')),
  'a no_cancellation, a polling, b polling', 'health: each function by itself'
);
select baton_test.beat(1, 'listening'), baton_test.beat(4, 'listening') \g /dev/null
select baton_test.complete('r', :m, :d) \g /dev/null
select is(baton_test.findings('polling'), null, 'health: nobody polls any more');
select is(baton_test.findings('no_cancellation'), null, 'health: and no body runs');
select * from finish();
rollback;
