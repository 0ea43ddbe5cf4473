-- The extension that make install put there can be created, is the version it says, and goes without a trace.
create extension pg_baton;
select baton.version() = e.extversion as same_version from pg_extension as e where e.extname = 'pg_baton';
drop extension pg_baton;
select to_regnamespace('baton') is null as gone;
