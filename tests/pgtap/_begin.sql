-- Starts a pgTAP file: a transaction that the file rolls back, a clock at 2026-01-01 00:00:00+00.
\set QUIET on
\set ON_ERROR_ROLLBACK off
\set ON_ERROR_STOP on
\pset format unaligned
\pset tuples_only on
\pset pager off
begin;
set local client_min_messages = warning;
set local search_path = tap, public;
\ir ../sql/test_clock.sql
\ir ../sql/checks.sql
