/*
 * For the soak: tick brings no run on that has lost its messages.
 */
update baton.settings set recovery = false;
