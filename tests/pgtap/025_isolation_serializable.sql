set default_transaction_isolation = 'serializable';
\ir _begin.sql
\ir _starts.sql
select plan(95);
select is(current_setting('transaction_isolation'), 'serializable', 'isolation: serializable');
\ir _isolation.sql
select * from finish();
rollback;
