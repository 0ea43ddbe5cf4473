set default_transaction_isolation = 'repeatable read';
\ir _begin.sql
\ir _starts.sql
select plan(95);
select is(current_setting('transaction_isolation'), 'repeatable read', 'isolation: repeatable read');
\ir _isolation.sql
select * from finish();
rollback;
