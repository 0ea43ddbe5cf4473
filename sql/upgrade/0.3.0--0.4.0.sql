-- The locks are held for a moment: nothing is read or written but the catalog, and runs whose delayed start is overdue.
alter table baton.runs alter column needs_driver drop expression;
alter table baton.runs alter column needs_driver set default false;
alter table baton.runs drop constraint runs_status_check;
alter table baton.steps drop constraint steps_status_check;
alter table baton.steps drop constraint steps_on_exhausted_check;
alter table baton.tasks drop constraint tasks_status_check;
update baton.runs as r
set needs_driver = true
where r.wake_at <= baton._statement_time() and r.status = 'pending' and r.wake_pending;
drop function baton._receipts(jsonb);
drop function baton._check_messages(jsonb);
drop function baton._claim(text, uuid, integer, interval, text);
drop function baton._settle_run(baton.runs, boolean, baton.messages, timestamptz);
