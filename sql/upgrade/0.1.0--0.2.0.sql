-- Adding a column without a default rewrites nothing.
alter table baton.queue_marks add column paused_at timestamptz;
