/* What the two llumlets say to each other (src/sterna/migration/messages/wire.py).

   The network is a set of messages: `net[Committed]` has a bit for each Committed that can be under
   way, told apart by what it carries. So messages overtake each other, and copies of one that are
   under way at once count as one. */

mtype:message = {
    Reserve, Reserved, StageCopied, Commit, CommitQuery, Committed, Aborted, Abort, Released,
    ForwardedAbort
};
#define MESSAGES 11 /* Spin counts the names of an mtype from 1. */

int net[MESSAGES];

/* What a Reserve asks for: a stage that is not the last one has blocks. */
#define NOT_LAST 0
#define LAST 1
#define LAST_EMPTY 2

/* The fields that tell one message of a kind from another, in one number. A reservation of 0 is
   None; a reason is REQUEST_ABORTED (1) or any other (0). */
#define RESERVE(stage, kind, reservation) (((stage) * 3 + (kind)) * (RESERVATIONS + 1) + (reservation))
#define STAGE(stage, reservation) ((stage) * (RESERVATIONS + 1) + (reservation))
#define COMMIT(stage, has_blocks, reservation) \
    (((stage) * 2 + (has_blocks)) * (RESERVATIONS + 1) + (reservation))
#define ABORTED(is_client, reservation) ((is_client) * (RESERVATIONS + 1) + (reservation))
#define RESERVATION_IN(fields) ((fields) % (RESERVATIONS + 1))
#define REST_OF(fields) ((fields) / (RESERVATIONS + 1))

#define IS_UNDER_WAY(message, fields) ((net[message] >> (fields)) & 1)

/* What is sent to the dead is lost. */
inline send(is_alive, message, fields) {
    if
    :: is_alive -> net[message] = net[message] | (1 << (fields))
    :: else
    fi
}

/* Let `fields` be those of any message of the kind that is under way. */
inline pick(message, fields) {
    fields = 0;
    do
    :: (net[message] >> fields) & 1 -> break
    :: (net[message] >> (fields + 1)) != 0 -> fields++
    od
}

inline take(message, fields) {
    pick(message, fields);
#ifdef FAULTS
    if
    :: net[message] = net[message] & ~(1 << fields)
    :: FAULT -> SPEND /* It comes once more. */
    fi
#endif
}
