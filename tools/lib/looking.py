"""A database at work beside any number of finished runs, and everything that an operator looks at."""

LOOKS = {
    "health()": "select * from baton.health()",
    "metrics()": "select baton.metrics()",
    "worker_startup": "select * from baton.worker_startup",
    "queue_stats": "select * from baton.queue_stats",
    "dead_letters": "select * from baton.dead_letters",
    "incident_log, the newest": "select * from baton.incident_log order by incident_id desc limit 50",
    "incident_log of a run": "select * from baton.incident_log where run_id = 'finished 7'",
    "run_overview of a run": "select * from baton.run_overview where run_id = 'finished 7'",
    "run_overview, active": "select * from baton.run_overview where active",
    "replays": "select * from baton.replays",
    "wedged_runs": "select * from baton.wedged_runs",
    "task_ownership": "select * from baton.task_ownership",
    "step_outputs of a run": "select * from baton.step_outputs where run_id = 'finished 7'",
}

AT_WORK = """
select baton.register_worker_function('f' || n, 'q', url => 'http://127.0.0.1:9') from generate_series(1, 10) as n;
select baton.register_worker(gen_random_uuid(), 'f' || n) from generate_series(1, 5) as n;
select baton.send('mail', '1') from generate_series(1, 50);
select baton.fail(c.message_id, c.delivery, 'no', final => true) from baton.claim('mail', max_messages => 20) as c;
select baton.start_run('w', '1', 'live ' || n, 'q') from generate_series(1, 100) as n;
do $$
declare
  v_run record;
  v_epoch bigint;
begin
  for v_run in select c.run_id, c.message_id, c.delivery from baton.claim('q', max_messages => 50) as c loop
    select b.replay_epoch into v_epoch from baton.begin_replay(v_run.message_id, v_run.delivery) as b;
    perform baton.create_step(v_run.run_id, v_epoch, 's', '[1, 2, 3, 4, 5]');
    perform baton.dispatch_tasks(v_run.run_id, v_epoch, inline_limit => 4);
  end loop;
end;
$$;
select baton.tick();
delete from baton.messages where run_id = 'live 100';
"""

FINISHED = [
    """insert into baton.runs (run_id, workflow_name, queue_name, status, last_seq, created_at, ended_at)
    select 'finished ' || n, 'w', 'q', (array['completed', 'failed', 'cancelled'])[1 + n %% 3], 3, baton._now(), baton._now()
    from generate_series(%(first)s::integer, %(last)s::integer) as n""",
    """insert into baton.events (run_id, seq, type, payload, created_at)
    select 'finished ' || n, e.seq, e.type, '{"step_slug": "s", "task_index": 0, "output": 1}', baton._now()
    from generate_series(%(first)s::integer, %(last)s::integer) as n,
      (values (1, 'run_created'), (2, 'task_completed'), (3, 'run_completed')) as e (seq, type)""",
    """insert into baton.steps (run_id, step_slug, status, task_count, open_tasks, created_seq)
    select 'finished ' || n, 's', 'completed', 1, 0, 1
    from generate_series(%(first)s::integer, %(last)s::integer) as n""",
    """insert into baton.tasks (run_id, step_slug, task_index, status, attempt)
    select 'finished ' || n, 's', 0, 'completed', 1 from generate_series(%(first)s::integer, %(last)s::integer) as n""",
    """insert into baton.incidents (at, kind, run_id)
    select baton._now(), 'run_recovered', 'finished ' || n
    from generate_series(%(first)s::integer, %(last)s::integer) as n where n %% 10 = 7""",
]


def at_work(conn):
    conn.execute(AT_WORK)


def finished(conn, first, last):
    """Runs that have ended, with all that is left of them."""
    for statement in FINISHED:
        conn.execute(statement, {"first": first, "last": last})
    conn.execute("vacuum (analyze) baton.runs, baton.events, baton.steps, baton.tasks, baton.incidents, baton.messages")


def plan(conn, sql):
    """That of a repeated look, with what it touched."""
    for _ in range(3):
        [answer] = conn.execute(f"explain (analyze, buffers, format json) {sql}").fetchone()[0]
    return answer["Plan"]


def buffers(conn, sql):
    found = plan(conn, sql)
    return found["Shared Hit Blocks"] + found["Shared Read Blocks"]
