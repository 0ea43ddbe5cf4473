\ir _begin.sql
\ir _queue.sql
\ir _tasks.sql
\ir ../sql/fold_tasks.sql
select plan(70);

create function baton_test.go_on(
  run_id text, next_step_slug text default 't', step_slug text default 's'
)
returns text
language sql
volatile
begin atomic
  select a.outcome
  from baton.runs as r
  cross join lateral baton.advance_run(
    r.run_id, r.replay_epoch, go_on.step_slug, '{"out": 1}', go_on.next_step_slug, '{"in": 2}'
  ) as a
  where r.run_id = go_on.run_id;
end;

-- All that there is of a run, apart from the marks of its last replay; its own name and receipts are left out.
create function baton_test.picture(run_id text)
returns jsonb
language sql
stable
begin atomic
  select jsonb_build_object(
    'run', (
      select to_jsonb(r) - '{run_id, queue_name, replay_epoch, replay_message_id, replay_delivery, replay_began_at}'::text[]
      from baton.runs as r where r.run_id = picture.run_id
    ),
    'steps', (
      select jsonb_agg(to_jsonb(s) - 'run_id' order by s.created_seq) from baton.steps as s where s.run_id = picture.run_id
    ),
    'tasks', (
      select jsonb_agg(
        (to_jsonb(t) - '{run_id, owner_message_id, owner_delivery}'::text[])
        || jsonb_build_object('is_owned', exists (
          select
          from baton.messages as m
          where m.message_id = t.owner_message_id and m.delivery = t.owner_delivery and m.claimed_at is not null
        )) order by t.step_slug, t.task_index
      )
      from baton.tasks as t where t.run_id = picture.run_id
    ),
    'events', (
      select jsonb_agg(
        (to_jsonb(e) - 'run_id') || jsonb_build_object(
          'payload',
          case jsonb_typeof(e.payload) when 'object' then e.payload - '{message_id, delivery}'::text[] else e.payload end
        ) order by e.seq
      )
      from baton.events as e where e.run_id = picture.run_id
    ),
    'messages', baton_test.messages(picture.run_id),
    'incidents', baton_test.incidents_of(picture.run_id)
  );
end;

-- The same without positions, and with the one event of the short way as the four of the long one.
create function baton_test.long_picture(run_id text)
returns jsonb
language sql
stable
begin atomic
  select p.value || jsonb_build_object(
    'run', (p.value -> 'run') - '{last_seq, wake_seq, replayed_seq}'::text[],
    'steps', (
      select jsonb_agg(s.value - 'created_seq' order by s.nth)
      from jsonb_array_elements(p.value -> 'steps') with ordinality as s (value, nth)
    ),
    'events', (
      select jsonb_agg(
        jsonb_build_array(l.type, l.correlation_id, l.payload, e.value -> 'created_at') order by e.nth, l.nth
      )
      from jsonb_array_elements(p.value -> 'events') with ordinality as e (value, nth)
      cross join lateral (
        select
          e.value ->> 'type' as type, e.value ->> 'correlation_id' as correlation_id, e.value -> 'payload' as payload,
          e.value #>> '{payload,step_slug}' as step_slug, e.value #>> '{payload,next_step_slug}' as next_step_slug
      ) as v
      cross join lateral (
        select 0 as nth, v.type, v.correlation_id, v.payload
        where v.type <> 'run_advanced'
        union all
        select a.nth, a.type, a.correlation_id, a.payload
        from (
          values
          (1, 'task_completed', null, jsonb_build_object(
            'step_slug', v.step_slug, 'task_index', 0, 'attempt', 1, 'output', v.payload -> 'output'
          )),
          (2, 'step_completed', null, jsonb_build_object('step_slug', v.step_slug)),
          (3, 'step_created', v.correlation_id, jsonb_build_object(
            'step_slug', v.next_step_slug, 'task_count', 1,
            'on_exhausted', v.payload -> 'on_exhausted', 'max_attempts', v.payload -> 'max_attempts'
          )),
          (4, 'task_started', null, jsonb_build_object('step_slug', v.next_step_slug, 'task_index', 0, 'attempt', 1))
        ) as a (nth, type, correlation_id, payload)
        where v.type = 'run_advanced'
      ) as l
    )
  )
  from (select baton_test.picture(long_picture.run_id) as value) as p;
end;

-- What it answers, and whether anything of the run has changed.
create function baton_test.declines(
  run_id text, next_step_slug text default 't', step_slug text default 's'
)
returns text
language plpgsql
volatile
as $$
declare
  v_before jsonb := baton_test.picture(declines.run_id);
  v_outcome text := baton_test.go_on(declines.run_id, declines.next_step_slug, declines.step_slug);
begin
  return v_outcome || case when baton_test.picture(declines.run_id) is distinct from v_before then ', changed' else '' end;
end;
$$;

-- The short way leads where the long one leads

select m as am, d as ad from baton_test.inline('a') \gset
select baton_test.inline('b') \g /dev/null
select is(baton_test.picture('b'), baton_test.picture('a'), 'advance: two runs that stand alike');
select outcome from baton.complete_task('a', 's', 0, 1, '{"out": 1}', :am, :ad) \g /dev/null
select replay_epoch as ae from baton.begin_replay(:am, :ad) \gset
select outcome from baton.create_step('a', :ae, 't', '[{"in": 2}]') \g /dev/null
select is(baton_test.dispatch('a', :ae), 'execute t/0#1', 'advance: the long way');
select is((select concat_ws(' ', n.outcome, n.status) from baton.end_replay('a', :ae, 5) as n), 'ended running', 'advance: to its end');
select is(baton_test.go_on('b'), 'advanced', 'advance: the short way');
select is(baton_test.long_picture('b'), baton_test.long_picture('a'), 'advance: leads to the same');
select is(
  baton_test.log('b'), 'task_started 0#1, run_advanced', 'advance: by one event'
);
select is(
  (select e.payload from baton.events as e where e.run_id = 'b' and e.seq = 4),
  (
    select jsonb_build_object(
      'step_slug', 's', 'output', jsonb '{"out": 1}', 'next_step_slug', 't', 'on_exhausted', 'fail_step',
      'max_attempts', 3, 'message_id', r.replay_message_id, 'delivery', r.replay_delivery
    )
    from baton.runs as r where r.run_id = 'b'
  ), 'advance: this is in it'
);
select is(baton_test.task('b', 0, 't'), 'started 1 0/0 under run', 'advance: the next body has started under the same receipt');
select is(baton_test.steps('b'), 's completed 0/1, t created 1/1', 'advance: its step waits for it');
select is(baton_test.run('b'), 'running 4/0/3', 'advance: nothing is unread');
select is(baton_test.wedged(), null, 'advance: and nothing wedged');
select is(baton_test.declines('b'), 'declined', 'advance: again: the body has ended');
select is(baton_test.go_on('b', 'u', step_slug => 't'), 'advanced', 'advance: and on, under the same epoch');
select is(
  (select jsonb_object_agg(o.step_slug, o.outputs) from baton.step_outputs as o where o.run_id = 'b'),
  '{"s": [{"out": 1}], "t": [{"out": 1}], "u": null}', 'advance: the outputs are those of the steps'
);
select is((select count(*) from baton_test.unfolded('b')), 0::bigint, 'advance: the log tells the same');
select r.replay_message_id as bm, r.replay_delivery as bd from baton.runs as r where r.run_id = 'b' \gset
select is(baton_test.complete('b', :bm, :bd, step_slug => 'u'), 'completed ended', 'advance: the last one ends the long way');
select replay_epoch as be from baton.begin_replay(:bm, :bd) \gset
select is((select c.outcome from baton.complete_run('b', :be, '{}') as c), 'done', 'advance: and the run with it');
select is(baton_test.messages('b'), null, 'advance: its message is gone');

-- The next step

select baton_test.inline('c') \g /dev/null
select is(
  (
    select a.outcome
    from baton.runs as r
    cross join lateral baton.advance_run('c', r.replay_epoch, 's', null, 't', null, 'skip_step', 5) as a
    where r.run_id = 'c'
  ), 'advanced', 'next: nothing in, nothing out'
);
select is(
  (select e.payload - '{message_id, delivery}'::text[] from baton.read_events('c', 3) as e limit 1),
  '{"step_slug": "s", "output": null, "next_step_slug": "t", "on_exhausted": "skip_step", "max_attempts": 5}', 'next: its limits'
);
select is((select t.input from baton.tasks as t where t.run_id = 'c' and t.step_slug = 't'), 'null', 'next: no input is a JSON null');
select is(
  (
    select a.outcome
    from baton.runs as r
    cross join lateral baton.advance_run('c', r.replay_epoch, 't', '1', 'u', '1', null, null) as a
    where r.run_id = 'c'
  ), 'advanced', 'next: nulls'
);
select is(
  (select format('%s %s', s.on_exhausted, s.max_attempts) from baton.steps as s where s.run_id = 'c' and s.step_slug = 'u'),
  'fail_step 3', 'next: are the defaults'
);
select is(baton_test.declines('c', 's', 'u'), 'declined', 'next: there is such a step');
select is(baton_test.declines('c', 'u', 'u'), 'declined', 'next: it is the same step');
select is(baton_test.sqlstate_of(c.statement), c.error, 'next: refused: ' || c.statement)
from (
  values
  ('select baton.advance_run(''c'', 1, ''u'', ''1'', '''', ''1'')', '22023'),
  ('select baton.advance_run(''c'', 1, ''u'', ''1'', null, ''1'')', '22023'),
  ('select baton.advance_run(''c'', 1, ''u'', ''1'', ''v'', ''1'', ''retry'')', '22023'),
  ('select baton.advance_run(''c'', 1, ''u'', ''1'', ''v'', ''1'', max_attempts => 0)', '22023'),
  ('select baton.advance_run(''c'', 1, ''u'', to_jsonb(repeat(''x'', 2000000)), ''v'', ''1'')', '54000'),
  ('select baton.advance_run(''c'', 1, ''u'', ''1'', ''v'', to_jsonb(repeat(''x'', 2000000)))', '54000'),
  ('select baton.advance_run(null, null, null, null, ''v'', null)', '00000')
) as c (statement, error);
select is(
  (select a.outcome from baton.advance_run(null, null, null, null, 'v', null) as a), 'declined', 'next: of no run'
);

update baton.settings set max_payload_bytes = 1024;
select is(
  (
    select string_agg(baton_test.sqlstate_of(format(c.call, i.input)), ' ')
    from (
      values ('select baton.create_step(''c'', 1, ''v'', jsonb_build_array(%L::jsonb))'), ('select baton.advance_run(''c'', 1, ''u'', ''1'', ''v'', %L)')
    ) as c (call)
    cross join (
      select jsonb_build_object('a', repeat('x', n)) as input from generate_series(990, 1024) as n
      where pg_column_size(jsonb_build_array(jsonb_build_object('a', repeat('x', n)))) > 1024
      order by n limit 1
    ) as i
  ), '54000 54000', 'next: an input is measured as create_step measures it'
);
update baton.settings set max_payload_bytes = default;

-- Whose replay was the last one

select baton_test.inline('e') \g /dev/null
select is(
  (
    select a.outcome
    from baton.runs as r
    cross join lateral baton.advance_run('e', r.replay_epoch + 1, 's', '1', 't', '1') as a
    where r.run_id = 'e'
  ), 'declined', 'replay: another epoch'
);
select is((select a.outcome from baton.advance_run('e', null, 's', '1', 't', '1') as a), 'declined', 'replay: none');
select is((select a.outcome from baton.advance_run('unknown', 1, 's', '1', 't', '1') as a), 'declined', 'replay: an unknown run');
select replay_epoch as ee from baton.runs where run_id = 'e' \gset
select e as e2 from baton_test.again('e') \gset
select baton_test.finish('e', :e2) \g /dev/null
select is((select a.outcome from baton.advance_run('e', :ee, 's', '1', 't', '1') as a), 'declined', 'replay: another has looked since');
select is(baton_test.declines('e'), 'declined', 'replay: and the body is not that one''s');
select e as fe from baton_test.made('f') \gset
select baton_test.dispatch('f', :fe) \g /dev/null
select is(baton_test.declines('f'), 'declined', 'replay: it has not ended');
select baton_test.finish('f', :fe) \g /dev/null
select is((select outcome from baton.cancel_run('f', 'x')), 'done', 'replay: the run ends');
select is(baton_test.declines('f'), 'declined', 'replay: of an ended run');

-- What has come since

select baton_test.inline('g') \g /dev/null
select outcome from baton.signal_run('g', 'hello') \g /dev/null
select is(baton_test.declines('g'), 'declined', 'since: a signal');
select e as he from baton_test.made('h') \gset
select baton_test.dispatch('h', :he) \g /dev/null
select outcome from baton.wake_run('h') \g /dev/null
select baton_test.finish('h', :he) \g /dev/null
select is(baton_test.run('h'), 'running 3/0/3 wake', 'since: a wake while it was replayed');
select is(baton_test.declines('h'), 'declined', 'since: is not lost');
select e as h2e from baton_test.made('h2') \gset
select baton_test.step('h2', :h2e, 'u') \g /dev/null
select m as h2m, d as h2d from (select r.replay_message_id as m, r.replay_delivery as d from baton.runs as r where r.run_id = 'h2') as x \gset
select is(baton_test.dispatch('h2', :h2e, 2), 'execute s/0#1, execute u/0#1', 'since: two steps are on their way');
select baton_test.finish('h2', :h2e) \g /dev/null
select is(baton_test.declines('h2'), 'declined', 'since: the other one goes on');
select baton_test.complete('h2', :h2m, :h2d, step_slug => 'u') \g /dev/null
select is(baton_test.run('h2'), 'running 7/7/5', 'since: one has ended');
select is(baton_test.declines('h2'), 'declined', 'since: which a replay has to see');
select e as ie from baton_test.made('i') \gset
select baton_test.dispatch('i', :ie) \g /dev/null
select baton_test.finish('i', :ie, baton._now() + interval '1 hour') \g /dev/null
select is(baton_test.declines('i'), 'declined', 'since: a timer is set');
select m as jm, d as jd, e as je from baton_test.made('j', 2) \gset
select is(baton_test.dispatch('j', :je, 2), 'execute s/0#1, execute s/1#1', 'since: two bodies run');
select baton_test.finish('j', :je) \g /dev/null
select is(baton_test.declines('j'), 'declined', 'since: one of them goes on');
select baton_test.complete('j', :jm, :jd, task_index => 1) \g /dev/null
select is(baton_test.declines('j'), 'declined', 'since: it has ended, which asks for no replay, and who decided may not have seen it');

-- The receipt

select m as km, d as kd from baton_test.inline('k') \gset
select baton_test.inline('k2') \g /dev/null
select baton_test.advance('29.999999 seconds') \g /dev/null
select is(baton_test.go_on('k2'), 'advanced', 'receipt: until its end');
select baton_test.advance('1 microsecond') \g /dev/null
select is(baton_test.declines('k'), 'declined', 'receipt: its claim has run out');
select is((select outcome from baton.extend(:km, :kd)), 'extended', 'receipt: extended');
select is(baton_test.go_on('k'), 'advanced', 'receipt: it is current again');
select m as lm, d as ld from baton_test.inline('l') \gset
select baton_test.park(:lm, :ld, force => true) \g /dev/null
select is(baton_test.declines('l'), 'declined', 'receipt: given back');
select baton_test.inline('n') \g /dev/null
select baton_test.advance('30 seconds') \g /dev/null
select baton_test.take('n') \g /dev/null
select is(baton_test.declines('n'), 'declined', 'receipt: taken by somebody else');
insert into baton.worker_functions (function_name, queue_name) values ('orders', 'o');
insert into baton.workers (worker_id, function_name, handshake, started_at, last_heartbeat_at)
values (baton_test.worker(1), 'orders', true, baton._now(), baton._now());
select e as oe from baton_test.made('o', worker_id => baton_test.worker(1)) \gset
select baton_test.dispatch('o', :oe) \g /dev/null
select baton_test.finish('o', :oe) \g /dev/null
select is(baton_test.go_on('o'), 'advanced', 'receipt: of a worker');
select is(
  (select t.worker_id from baton.tasks as t where t.run_id = 'o' and t.step_slug = 't'), baton_test.worker(1), 'receipt: whose body it is'
);
select baton.stop_worker(baton_test.worker(1)) \g /dev/null
select is(baton_test.declines('o', 'u', 't'), 'declined', 'receipt: of a worker that stops');

-- The body

select baton_test.inline('p') \g /dev/null
select is(baton_test.declines('p', step_slug => 'x'), 'declined', 'body: of no step');
select baton_test.advance('30 seconds') \g /dev/null
select e as pe from baton_test.replay('p') \gset
select is(baton_test.dispatch('p', :pe), 'execute s/0#2', 'body: in its second attempt');
select baton_test.finish('p', :pe) \g /dev/null
select is(baton_test.declines('p'), 'declined', 'body: ends alone');
select baton_test.inline('q') \g /dev/null
select baton_test.release('q') \g /dev/null
select is(baton_test.declines('q'), 'declined', 'body: given up by an operator');
select baton_test.inline('r') \g /dev/null
insert into baton.messages (queue_name, kind, run_id, step_slug, task_index, dedupe_key, visible_at, created_at)
values ('r', 'task', 'r', 's', 0, e'r\x1fs\x1f0', baton._now(), baton._now());
select is(baton_test.declines('r'), 'declined', 'body: with a message of its own');
select baton_test.inline('u') \g /dev/null
update baton.tasks set owner_message_id = owner_message_id - 1 where run_id = 'u';
select is(baton_test.declines('u'), 'declined', 'body: under another message');
update baton.tasks set owner_message_id = owner_message_id + 1, owner_delivery = owner_delivery - 1 where run_id = 'u';
select is(baton_test.declines('u'), 'declined', 'body: under another delivery');
update baton.tasks set owner_delivery = owner_delivery + 1, status = 'skipped' where run_id = 'u';
select is(baton_test.declines('u'), 'declined', 'body: that has ended');
select * from finish();
rollback;
