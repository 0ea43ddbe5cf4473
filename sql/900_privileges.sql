/*
 * Nothing is left to PUBLIC: all comes through grant_usage. Last, so that it covers every object.
 */
revoke all on schema baton from public;
revoke all on all tables in schema baton from public;
revoke all on all sequences in schema baton from public;
revoke all on all routines in schema baton from public;
