\ir _begin.sql
select plan(33);

-- A role that strangers have, behind an API that offers functions of one schema: it sends through one of them, and
-- reads nothing. And messages that a user's own table sends.

create function baton_test.sqlstate_as(role_name text, statement text)
returns text
language plpgsql
as $$
begin
  execute format('set local role %I', sqlstate_as.role_name);
  execute sqlstate_as.statement;
  reset role;
  return 'nothing';
exception
  when others then
    reset role;
    return sqlstate;
end;
$$;
grant usage on schema tap to public;

create role baton_test_anon;
create role baton_test_app;
select baton.grant_usage('baton_test_app', 'client') \g /dev/null
grant baton_test_app to current_user;
create schema baton_test_api authorization baton_test_app;
grant usage on schema baton_test_api to baton_test_anon;
set local role baton_test_app;
create function baton_test_api.order_pizza(pizza jsonb)
returns text
language sql
security definer
set search_path = pg_catalog, pg_temp
as $$select s.outcome from baton.send('pizzas', order_pizza.pizza, dedupe_key => order_pizza.pizza ->> 'key') as s$$;
revoke all on function baton_test_api.order_pizza(jsonb) from public;
grant execute on function baton_test_api.order_pizza(jsonb) to baton_test_anon;
reset role;

select baton.send('pizzas', '{"secret": "of another"}') \g /dev/null
set local role baton_test_anon;
select tap.is(baton_test_api.order_pizza('{"key": "a"}'), 'sent', 'api: a stranger sends through a function of the application');
select tap.is(baton_test_api.order_pizza('{"key": "a"}'), 'duplicate', 'api: and hears what that answers');
reset role;
select is(baton_test.sqlstate_as('baton_test_anon', s.statement), '42501', 'api: but may not: ' || s.statement)
from unnest(array[
  'select baton.send(''pizzas'', ''1'')', 'select baton.claim(''pizzas'')', 'select baton.ack(1, 1)', 'select baton.version()',
  'select baton.start_run(''w'', ''1'')', 'select baton.get_run(''r'')', 'select baton.read_events(''r'')', 'select baton.health()',
  'select baton.metrics()', 'select baton.tick()', 'select baton.grant_usage(''baton_test_anon'', ''admin'')',
  'select baton._now()', 'select baton._errors()', 'select from baton.messages', 'select from baton.settings',
  'select from baton.secrets', 'select from baton.queue_stats', 'select from baton.incident_log',
  'select from baton.worker_startup', 'select from baton.run_overview', 'select from baton.dead_letters',
  'select last_value from baton.messages_message_id_seq'
]) as s (statement);
select is_empty($$
  select c.relname, a.attname
  from pg_class as c
  inner join pg_attribute as a on a.attrelid = c.oid and not a.attisdropped
  where c.relnamespace = 'baton'::regnamespace and c.relkind in ('r', 'v')
    and has_column_privilege('baton_test_anon', c.oid, a.attnum, 'select, insert, update, references')
$$, 'api: no column of any table or view is open to it');
grant usage on schema baton to baton_test_anon;
select is(baton_test.sqlstate_as('baton_test_anon', s.statement), '42501', 'api: nor where the schema is offered as well: ' || s.statement)
from unnest(array[
  'select baton.send(''pizzas'', ''1'')', 'select baton.claim(''pizzas'')', 'select from baton.messages', 'select from baton.queue_stats'
]) as s (statement);
revoke usage on schema baton from baton_test_anon;

-- A user's own table, whose trigger sends

create table baton_test_api.orders (order_id integer, amount numeric);
alter table baton_test_api.orders owner to baton_test_app;
set local role baton_test_app;
create function baton_test_api.order_made()
returns trigger
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform baton.send('orders', to_jsonb(new), dedupe_key => 'order ' || new.order_id);
  return null;
end;
$$;
create trigger order_made after insert on baton_test_api.orders
for each row execute function baton_test_api.order_made();
grant insert, select on baton_test_api.orders to baton_test_anon;
reset role;
set local role baton_test_anon;
insert into baton_test_api.orders (order_id, amount) values (1, 9.5), (2, 3);
reset role;
select results_eq(
  $$select c.payload from baton.claim('orders', max_messages => 10) as c$$,
  $$values ('{"order_id": 1, "amount": 9.5}'::jsonb), ('{"order_id": 2, "amount": 3}')$$,
  'trigger: each row that somebody inserts is a message, though he may not send'
);
savepoint row_3;
insert into baton_test_api.orders (order_id, amount) values (3, 1);
rollback to row_3;
select is_empty($$select c.message_id from baton.claim('orders') as c$$, 'trigger: no row, no message');
insert into baton_test_api.orders (order_id, amount) values (1, 7);
select is((select count(*) from baton_test_api.orders), 3::bigint, 'trigger: a key that is taken does not hinder the row');
revoke execute on function baton.send(text, jsonb, interval, text, text, jsonb) from baton_test_app;
select is(
  baton_test.sqlstate_as('baton_test_anon', 'insert into baton_test_api.orders values (4, 1)'), '42501',
  'trigger: it sends with the rights of its owner, and no others'
);

select * from finish();
rollback;
