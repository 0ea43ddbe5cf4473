"""The package itself, as the peers are driven."""

from __future__ import annotations

import sys

from bench_peer import Peer

SEND = "select outcome from baton.send('mail', '{\"n\": 1}')"
CLAIM = "(select message_id, delivery, payload from baton.claim('mail', visibility => '1 hour'))"
ACK = "baton.ack(:{0}message_id, :{0}delivery)"
# A consumer writes its receipts itself: this is the cheapest way to have them written by the server.
CLAIM_MANY = """(
  select json_agg(m) as receipts
  from (select message_id, delivery from baton.claim('mail', max_messages => {}, visibility => '1 hour')) as m
)"""
ACK_MANY = "(select count(*) filter (where m.outcome = 'acked') as acked from baton.ack_many(:{}receipts) as m)"


# What a message's verbs change, without a function, a check, or anything else that they promise.
BARE_SEND = """insert into baton.messages (queue_name, payload, visible_at, created_at)
select 'mail', '{{"n": 1}}', now(), now() from generate_series(1, {})"""
BARE_CLAIM = """taken as (
  update baton.messages as m
  set delivery = 1, claimed_at = now(), visible_at = now() + '1 hour'
  where m.message_id = any (array(
    select d.message_id from baton.messages as d
    where d.queue_name = 'mail' and d.visible_at <= now()
    order by d.visible_at, d.message_id limit {} for no key update skip locked
  ))
  returning m.message_id
)
select array_agg(t.message_id) as ids from taken as t \\gset bare_
"""
BARE_FINISH = "gone as (delete from baton.messages as m where m.message_id = any (cast(:bare_ids as bigint[]))),"


def claim_and_finish(claim: str, finish: str) -> str:
    return f"select c.* from {claim} as c \\gset\nselect a.* from {finish} as a \\gset\n"


def in_one(finish: str, claim: str) -> str:
    """Finish what the transaction before claimed and claim the next: one statement, one commit."""
    return f"""\\if :next_started = 0
select c.* from {claim} as c \\gset next_
\\set next_started 1
\\else
select c.* from {finish} as a left join lateral {claim} as c on true \\gset next_
\\endif
"""


def bare_in_one(batch: int) -> str:
    claim = BARE_CLAIM.format(batch)
    return f"\\if :bare_started = 0\nwith {claim}\\set bare_started 1\n\\else\nwith {BARE_FINISH} {claim}\\endif\n"


class Baton(Peer):
    name = "baton"
    packages = []
    driver = "bench_baton_driver.py"
    schema = "baton"
    left = "select count(*) from baton.messages where queue_name = 'mail' and claimed_at is null and visible_at <= now()"
    clear = "delete from baton.messages where queue_name = 'mail'"

    delayed = """
        insert into baton.messages (queue_name, payload, visible_at, created_at)
        select 'mail', '{"n": 1}', now() + '1 day', now() from generate_series(1, %(rows)s)
    """
    finished = """
        insert into baton.messages (queue_name, payload, visible_at, created_at)
        select 'done', '{"n": 1}', now(), now() from generate_series(1, %(rows)s);
        delete from baton.messages where queue_name = 'done'
    """

    def __init__(self):
        self.enqueue = {1: f"{SEND} \\gset\n"}
        self.finish = {1: claim_and_finish(CLAIM, ACK.format(""))}
        self.finish_and_next = {1: in_one(ACK.format("next_"), CLAIM)}
        self.bare_enqueue = {batch: BARE_SEND.format(batch) + ";\n" for batch in (1, 10, 100)}
        self.bare_finish = {batch: bare_in_one(batch) for batch in (1, 10, 100)}
        for batch in (10, 100):
            messages = "[" + ", ".join(['{"payload": {"n": 1}}'] * batch) + "]"
            claim = CLAIM_MANY.format(batch)
            self.enqueue[batch] = f"select count(*) as sent from baton.send_many('mail', '{messages}') \\gset\n"
            self.finish[batch] = claim_and_finish(claim, ACK_MANY.format(""))
            self.finish_and_next[batch] = in_one(ACK_MANY.format("next_"), claim)

    def program(self):
        return [sys.executable]
