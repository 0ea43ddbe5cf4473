-- The wakes that are there keep their keys until a replay is granted under them.
alter table baton.runs add column wake_message_id bigint;
update baton.runs as r
set wake_message_id = m.message_id
from baton.messages as m
where m.run_id = r.run_id and m.dedupe_key = r.run_id || e'\x1fwake';
drop function baton._send_run_message(baton.runs, text, timestamptz, timestamptz);
drop function baton._ensure_wake(baton.runs, timestamptz);
drop function baton._leave(bigint, bigint);
