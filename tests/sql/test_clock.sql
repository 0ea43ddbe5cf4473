/*
 * A clock that stands still until a test moves it, in place of the real one. Inside a transaction ROLLBACK brings the
 * real one back. Everybody may read it: a view asks for the time as its reader.
 */
create schema baton_test;
grant usage on schema baton_test to public;

create table baton_test.clock (at timestamptz not null);
grant select on baton_test.clock to public;
insert into baton_test.clock (at) values ('2026-01-01 00:00:00+00');

create or replace function baton._now()
returns timestamptz
language sql
volatile
begin atomic
  select c.at from baton_test.clock as c;
end;

create function baton_test.set_clock(at timestamptz)
returns timestamptz
language sql
volatile
begin atomic
  update baton_test.clock as c set at = set_clock.at returning c.at;
end;

create function baton_test.advance(by interval)
returns timestamptz
language sql
volatile
begin atomic
  update baton_test.clock as c set at = c.at + advance.by returning c.at;
end;
