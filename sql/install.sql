-- Installs pg_baton: psql "$DATABASE_URL" -X -1 -v ON_ERROR_STOP=1 -f sql/install.sql
-- State files first, then code, which calls lower numbers only.
\set ON_ERROR_STOP on
\ir 000_schema.state.sql
\ir 040_settings.state.sql
\ir 050_incidents.state.sql
\ir 100_messages.state.sql
\ir 200_workers.state.sql
\ir 010_version.sql
\ir 020_errors.sql
\ir 025_checks.sql
\ir 030_clock.sql
\ir 045_settings.sql
\ir 055_incidents.sql
\ir 105_queue_marks.sql
\ir 110_messages.sql
\ir 115_receipts.sql
\ir 120_dead_messages.sql
\ir 210_functions.sql
\ir 215_deploys.sql
\ir 220_workers.sql
\ir 230_handshake.sql
\ir 240_delivery.sql
\ir 245_fail.sql
\ir 250_ensure_workers.sql
\ir 260_responses.sql
\ir 590_cron.sql
\ir 600_tick.sql
\ir 610_schedule.sql
\ir 700_views.sql
\ir 710_health.sql
\ir 800_roles.sql
\ir 900_privileges.sql
\ir 950_extension_dump.sql
