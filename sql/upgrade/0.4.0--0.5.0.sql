alter table baton.runs add column wake_message_id bigint;
update baton.runs as r
set wake_message_id = m.message_id
from baton.messages as m
where m.run_id = r.run_id and m.dedupe_key = r.run_id || e'\x1fwake';
-- One that somebody has open keeps its key until its grant, which does no harm: waiting here could end in a deadlock.
with wakes as (
  select m.message_id
  from baton.messages as m
  where m.dedupe_key = m.run_id || e'\x1fwake'
  for no key update of m skip locked
)
update baton.messages as m
set dedupe_key = null
from wakes as w
where m.message_id = w.message_id;
drop function baton._send_run_message(baton.runs, text, timestamptz, timestamptz);
drop function baton._ensure_wake(baton.runs, timestamptz);
drop function baton._leave(bigint, bigint);
