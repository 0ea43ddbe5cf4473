-- No table changes.
drop function if exists baton._note_operator(text, text);
