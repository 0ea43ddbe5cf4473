create or replace function baton.version()
returns text
language sql
immutable
begin atomic
  select '0.5.0'::text as version;
end;

comment on function baton.version() is
'The version of the installed package.
Returns: the version, as text
Raises: none
Locks: none';
