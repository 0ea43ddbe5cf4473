/*
 * Starting a task under its own message: single flight, over all processes and machines. The loser never acks early.
 */
-- Spends the receipt that a dead owner was started under, so that its late extend is lost; the caller has found it dead
-- under its row's lock.
create or replace function baton._take_over(task baton.tasks, by_message_id bigint)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  update baton.messages as m
  set claimed_at = null
  where m.message_id = (_take_over.task).owner_message_id
    and m.message_id <> _take_over.by_message_id
    and m.delivery = (_take_over.task).owner_delivery
    and m.claimed_at is not null;
end;
$$;

create or replace function baton.start_task(
  message_id bigint,
  delivery bigint,
  out outcome text,
  out run_id text,
  out step_slug text,
  out task_index integer,
  out attempt integer,
  out workflow_name text,
  out input jsonb,
  out retry_after interval
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
/*
 *   the first row that applies
 *   the receipt isn't current, has run out, or isn't a task message's   lost
 *   run, step or task ended, unknown or pruned                          skip
 *   created, retry_at ahead                                             await
 *   created                                                             execute
 *   started under this receipt                                          execute, same attempt
 *   started under another message that lives                            await
 *   started otherwise                                                   execute; lost for the last time: skip
 */
declare
  v_run baton.runs;
  v_message baton.messages;
  v_task baton.tasks;
  v_owned_by text;
  v_decision text;
  v_now timestamptz;
begin
  select m.run_id, m.step_slug, m.task_index
  into start_task.run_id, start_task.step_slug, start_task.task_index
  from baton.messages as m
  where m.message_id = start_task.message_id and m.kind = 'task';
  if not found then
    outcome := 'lost';
    return;
  end if;
  v_run := baton._lock_run(start_task.run_id);
  v_message := baton._lock_receipt(start_task.message_id, start_task.delivery);
  v_now := baton._now();
  if (v_message.visible_at > v_now) is not true then
    outcome := 'lost';
    perform baton._note_lost(start_task.message_id, start_task.delivery, 'start_task');
    return;
  end if;

  select t.*
  into v_task
  from baton.tasks as t
  where t.run_id = v_run.run_id and t.step_slug = start_task.step_slug and t.task_index = start_task.task_index;
  if v_task.status = 'started' then
    if v_task.owner_message_id = v_message.message_id and v_task.owner_delivery = v_message.delivery then
      v_owned_by := 'receipt';
    elsif v_task.owner_message_id <> v_message.message_id
      and baton._claim_lives(v_task.owner_message_id, v_task.owner_delivery, v_now) then
      v_owned_by := 'other';
    end if;
  end if;
  v_decision := baton._start_decision(
    baton._is_open(v_run.status), v_task.status, v_task.retry_at, v_owned_by, v_now
  );
  attempt := v_task.attempt;
  workflow_name := v_run.workflow_name;
  case v_decision
    when 'skip' then
      outcome := 'skip';
      delete from baton.messages as m where m.message_id = v_message.message_id;
      return;
    when 'await' then
      outcome := 'await';
      perform baton._tally('await');
      if v_task.status = 'created' then
        retry_after := v_task.retry_at - v_now;
      else
        -- Locked, it may be gone by now: then the caller asks again soon.
        select greatest(m.visible_at - v_now, '1 second')
        into start_task.retry_after
        from baton.messages as m
        where m.message_id = v_task.owner_message_id
        for no key update of m skip locked;
        retry_after := coalesce(retry_after, interval '1 second' * (1 + 0.2 * random()));
      end if;
      update baton.messages as m
      set visible_at = v_now + start_task.retry_after, claimed_at = null
      where m.message_id = v_message.message_id;
      return;
    when 'again' then
      outcome := 'execute';
      input := v_task.input;
      return;
    when 'execute' then
      outcome := 'execute';
    when 'recover' then
      outcome := 'execute';
      v_task.lapses := v_task.lapses + 1;
      perform baton._take_over(v_task, v_message.message_id);
      if v_task.lapses >= (select s.max_lapses from baton.settings as s where s.singleton) then
        outcome := 'skip';
        v_run := baton._exhaust_task(v_run, v_task, jsonb_build_object('reason', 'max_lapses'), v_now);
        perform baton._save_positions(v_run);
        perform baton._wake(v_run, v_now);
        perform baton._incident(
          v_now, 'limit_reached', queue_name => v_run.queue_name, run_id => v_run.run_id,
          step_slug => v_task.step_slug, task_index => v_task.task_index,
          detail => jsonb_build_object('lapses', v_task.lapses)
        );
        delete from baton.messages as m where m.message_id = v_message.message_id;
        return;
      end if;
      perform baton._incident(
        v_now, case when v_task.owner_message_id = v_message.message_id then 'owned_recovery' else 'takeover' end,
        queue_name => v_run.queue_name, run_id => v_run.run_id, message_id => v_task.owner_message_id,
        step_slug => v_task.step_slug, task_index => v_task.task_index,
        detail => jsonb_build_object('attempt', v_task.attempt)
      );
  end case;

  perform baton._start(v_task, v_message, v_run.last_seq + 1, v_now);
  update baton.runs as r set last_seq = r.last_seq + 1 where r.run_id = v_run.run_id;
  attempt := v_task.attempt + 1;
  input := v_task.input;
end;
$$;

comment on function baton.start_task(bigint, bigint) is
'Ask for the task that a claimed task message names. Of all who ask, on all machines, one executes it while it lives; the others wait.
Outcomes: execute, with run_id, step_slug, task_index, attempt, workflow_name, input; await, with retry_after: another one runs it, or its retry is not due yet; the message is due again then; skip: there is nothing to run any more, the message is removed; lost, where the receipt is not current or its claim has run out
Raises: 25001
Locks: the run, then the message; the owner''s message never waiting';
