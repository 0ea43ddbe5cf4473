-- Workers and clients over HTTP: the roles for PostgREST, in front of the database in which pg_baton is installed.
-- Run it as the owner of the package, without the lines for roles that are there already. PostgREST's own configuration
-- then says:
--
--   db-uri     = "postgres://authenticator@localhost/app"
--   db-schemas = "api, baton"
--   jwt-secret = "…"                    -- a token's claim `role` names one of the two roles below
--
-- There is no db-anon-role: who has no token may call nothing. And no db-max-rows: dispatch_tasks answers a row for each
-- unfinished task of a run, and a worker that sees only some of them does not see what it was given.

create role authenticator login noinherit;    -- what PostgREST connects as: it may become the two, and no more

create role app_worker nologin;               -- workers: POST /rpc/claim, with the header Content-Profile: baton
grant app_worker to authenticator;
select * from baton.grant_usage('app_worker', 'worker');
alter role app_worker set statement_timeout = '10s';   -- PostgREST applies a role's settings to its requests

-- People get no verbs. They get a function a wish, which checks it, and is the only thing that may ask for it.
create role app_user nologin;
grant app_user to authenticator;

create schema api;
grant usage on schema api to app_user;

create function api.place_order(order_number integer, amount integer, items text[])
returns text
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  if place_order.amount <= 0 or coalesce(cardinality(place_order.items), 0) not between 1 and 100 then
    raise exception 'an order has an amount, and 1 to 100 items' using errcode = '22023';
  end if;
  return (
    select r.outcome
    from baton.start_run(
      workflow_name => 'order',
      input => jsonb_build_object('amount', place_order.amount, 'items', to_jsonb(place_order.items)),
      run_id => 'order-' || place_order.order_number
    ) as r
  );
end;
$$;

revoke all on function api.place_order(integer, integer, text[]) from public;
grant execute on function api.place_order(integer, integer, text[]) to app_user;
