/*
 * Stand-in for Supabase Vault: the same view and functions over a plain table, nothing granted to PUBLIC.
 * `secret` holds base64 in place of the ciphertext, so that reading the wrong column shows.
 */
create schema vault;

create table vault.secrets (
  id uuid primary key default gen_random_uuid(),
  name text,
  description text not null default '',
  secret text not null,
  key_id uuid,
  nonce bytea default uuid_send(gen_random_uuid()),
  created_at timestamptz not null default current_timestamp,
  updated_at timestamptz not null default current_timestamp
);

create unique index on vault.secrets (name) where name is not null;

create view vault.decrypted_secrets as
select
  s.id,
  s.name,
  s.description,
  s.secret,
  convert_from(decode(s.secret, 'base64'), 'utf8') as decrypted_secret,
  s.key_id,
  s.nonce,
  s.created_at,
  s.updated_at
from vault.secrets as s;

create function vault.create_secret(
  new_secret text,
  new_name text default null,
  new_description text default '',
  new_key_id uuid default null
)
returns uuid
language sql
security definer
set search_path = ''
as $$
  insert into vault.secrets (secret, name, description)
  values (
    encode(convert_to(create_secret.new_secret, 'utf8'), 'base64'),
    create_secret.new_name,
    create_secret.new_description
  )
  returning secrets.id
$$;

create function vault.update_secret(
  secret_id uuid,
  new_secret text default null,
  new_name text default null,
  new_description text default null,
  new_key_id uuid default null
)
returns void
language sql
security definer
set search_path = ''
as $$
  update vault.secrets as s
  set
    secret = coalesce(encode(convert_to(update_secret.new_secret, 'utf8'), 'base64'), s.secret),
    name = coalesce(update_secret.new_name, s.name),
    description = coalesce(update_secret.new_description, s.description),
    updated_at = now()
  where s.id = update_secret.secret_id
$$;

revoke all on function vault.create_secret, vault.update_secret from public;
