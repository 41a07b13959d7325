/* The destination's machine (src/sterna/migration/destination.py), and what B's coordinator does
   when it has none (coordinator.py). What the code calls illegal is an assertion here. */

mtype:destination_state = {
    DESTINATION_NEW, DESTINATION_RESERVING, DESTINATION_RECEIVING, DESTINATION_RECEIVED,
    DESTINATION_COMMITTING, DESTINATION_ADOPTING, DESTINATION_COMMITTED, DESTINATION_GIVING_UP,
    DESTINATION_FREEING, DESTINATION_OVER
};

mtype:destination_state destination = DESTINATION_NEW;
byte d_stage;
byte d_kind;
byte d_reservation;
bit d_has_reserved;
bit d_has_source_aborted;
bit d_has_client_aborted;
bit d_is_peer_dead;
bit d_gives_up_for_client;
bit d_has_blocks; /* Of the Commit: the last stage has blocks. */
byte num_reservations;

mtype:effect b_effect;
mtype:event b_outcome;

#define DESTINATION_HAS_MACHINE (destination != DESTINATION_NEW && destination != DESTINATION_OVER)
#define DESTINATION_IS_SETTLED \
    (!DESTINATION_HAS_MACHINE || destination == DESTINATION_COMMITTED)
#define BETWEEN_STAGES (destination == DESTINATION_RECEIVING || destination == DESTINATION_RECEIVED)
#define IS_LEASED \
    (destination == DESTINATION_RESERVING || BETWEEN_STAGES || destination == DESTINATION_COMMITTING)

/* The dead hear nothing; B stops sending to A when it knows. */
inline answer(message, fields) { send(a_is_alive && !b_knows_a_dead, message, fields) }

inline destination_over() {
    destination = DESTINATION_OVER;
    d_stage = 0; d_kind = 0; d_reservation = 0; d_has_reserved = 0; d_has_source_aborted = 0;
    d_has_client_aborted = 0; d_is_peer_dead = 0; d_gives_up_for_client = 0; d_has_blocks = 0
}

/* `_end` with a reason. */
inline destination_end(is_client) {
    if
    :: d_is_peer_dead -> skip
    :: else -> answer(Aborted, ABORTED(is_client, d_reservation))
    fi;
    destination_over()
}

/* `_free` */
inline destination_free(is_client) {
    if
    :: !d_has_reserved -> destination_end(is_client)
    :: else ->
        d_gives_up_for_client = is_client;
        destination = DESTINATION_FREEING; b_effect = FreeReservation
    fi
}

/* `_give_up` */
inline give_up(is_client) {
    if
    :: destination == DESTINATION_RESERVING ->
        d_gives_up_for_client = is_client; destination = DESTINATION_GIVING_UP
    :: else -> destination_free(is_client)
    fi
}

inline reserve(stage, kind) {
    d_stage = stage; d_kind = kind;
    destination = DESTINATION_RESERVING; b_effect = ReserveBlocks
}

inline adopt(has_blocks) {
    d_has_blocks = has_blocks;
    destination = DESTINATION_ADOPTING; b_effect = Adopt
}

#define IS_BEFORE_ADOPT IS_LEASED
#define IS_GIVEN_UP (destination == DESTINATION_GIVING_UP || destination == DESTINATION_FREEING)

/* ------------------------------------------------------------------------------ arrived messages */

#ifdef BREAK_RESERVATIONS_HAVE_NO_NUMBERS
#define IS_MINE(reservation) true
#else
#define IS_MINE(reservation) (d_reservation == (reservation))
#endif

/* The coordinator's `_open`. A reservation beyond the bound is refused. */
inline open_machine(kind) {
    if
    :: FAULT -> SPEND; answer(Aborted, ABORTED(0, 0)) /* BUSY, TERMINATING, DUPLICATE_REQUEST. */
    :: num_reservations < RESERVATIONS ->
        num_reservations++; d_reservation = num_reservations;
        reserve(0, kind)
    :: num_reservations == RESERVATIONS -> answer(Aborted, ABORTED(0, 0))
    fi
}

#ifdef BREAK_TELLS_OF_A_LAST_STAGE
#define TELLS_OF_A_LAST_STAGE true
#else
#define TELLS_OF_A_LAST_STAGE false
#endif

inline destination_on_reserve(stage, kind, reservation) {
    if
    :: !DESTINATION_HAS_MACHINE && reservation == 0 -> assert(stage == 0); open_machine(kind)
    :: !DESTINATION_HAS_MACHINE && reservation != 0 -> answer(Aborted, ABORTED(0, reservation))
    :: DESTINATION_HAS_MACHINE && reservation != 0 && reservation != d_reservation ->
        answer(Aborted, ABORTED(0, reservation))
    :: else ->
        if
        :: (BETWEEN_STAGES && stage == d_stage + 1
            && (destination == DESTINATION_RECEIVED || d_kind != NOT_LAST)) ->
            reserve(stage, kind)
        :: destination == DESTINATION_RECEIVING && stage == d_stage ->
            answer(Reserved, STAGE(d_stage, d_reservation))
        :: destination == DESTINATION_RECEIVED && stage == d_stage ->
            if
            :: d_kind == NOT_LAST || TELLS_OF_A_LAST_STAGE ->
                answer(StageCopied, STAGE(d_stage, d_reservation))
            :: else /* The source has had its answer, or it could not have copied. */
            fi
        :: IS_GIVEN_UP -> skip
        :: else -> assert(stage <= d_stage) /* Repeated or overtaken. */
        fi
    fi
}

#ifdef BREAK_ADOPTS_WITHOUT_CHECKING
#define HAS_ALL_BLOCKS(has_blocks) true
#else
#define HAS_ALL_BLOCKS(has_blocks) (destination == DESTINATION_RECEIVED || !(has_blocks))
#endif

inline destination_on_commit(stage, has_blocks, reservation) {
    if
    :: !DESTINATION_HAS_MACHINE || !IS_MINE(reservation) ->
        answer(Aborted, ABORTED(0, reservation))
    :: else ->
        if
        :: BETWEEN_STAGES ->
#ifndef BREAK_RESERVATIONS_HAVE_NO_NUMBERS
            assert(d_kind != NOT_LAST && stage == d_stage && (d_kind == LAST || !has_blocks));
#endif
            if
            :: HAS_ALL_BLOCKS(has_blocks) -> adopt(has_blocks)
            :: else -> d_has_blocks = has_blocks; destination = DESTINATION_COMMITTING
            fi
        :: destination == DESTINATION_COMMITTED -> answer(Committed, d_reservation)
        :: destination == DESTINATION_RESERVING ->
#ifndef BREAK_RESERVATIONS_HAVE_NO_NUMBERS
            assert(false)
#else
            skip
#endif
        :: else /* COMMITTING, ADOPTING: the verdict will answer; given up: Aborted will. */
        fi
    fi
}

inline destination_on_commit_query(reservation) {
    if
    :: !DESTINATION_HAS_MACHINE || !IS_MINE(reservation) ->
        answer(Aborted, ABORTED(0, reservation))
    :: else ->
        if
        :: BETWEEN_STAGES ->
#ifndef BREAK_RESERVATIONS_HAVE_NO_NUMBERS
            assert(d_kind != NOT_LAST);
#endif
            give_up(0) /* COMMIT_LOST */
        :: destination == DESTINATION_COMMITTED -> answer(Committed, d_reservation)
        :: destination == DESTINATION_RESERVING ->
#ifndef BREAK_RESERVATIONS_HAVE_NO_NUMBERS
            assert(false)
#else
            skip
#endif
        :: else
        fi
    fi
}

inline destination_on_abort(is_client) {
    if
    :: IS_BEFORE_ADOPT -> give_up(is_client)
    :: destination == DESTINATION_COMMITTED -> answer(Committed, d_reservation)
    :: else
    fi
}

inline destination_on_released() {
    if
    :: IS_BEFORE_ADOPT -> give_up(0)
    :: destination == DESTINATION_COMMITTED -> destination_over()
    :: else
    fi
}

inline destination_on_forwarded_abort(reservation) {
    if
    :: !DESTINATION_HAS_MACHINE || !IS_MINE(reservation) ->
        answer(Aborted, ABORTED(0, reservation))
    :: else ->
        if
        :: IS_BEFORE_ADOPT -> give_up(1)
        :: destination == DESTINATION_ADOPTING -> d_has_source_aborted = 1
        :: destination == DESTINATION_COMMITTED ->
            abort_request_at_b();
            answer(Aborted, ABORTED(1, d_reservation));
            destination_over()
        :: else
        fi
    fi
}

/* ------------------------------------------------------------------------------ outcomes and time */

inline destination_on_blocks_reserved() {
    d_has_reserved = 1;
    if
    :: destination == DESTINATION_RESERVING ->
        destination = DESTINATION_RECEIVING;
        answer(Reserved, STAGE(d_stage, d_reservation))
    :: destination == DESTINATION_GIVING_UP -> destination_free(d_gives_up_for_client)
    fi
}

inline destination_on_reserve_failed() {
    if
    :: destination == DESTINATION_RESERVING -> destination_free(0)
    :: destination == DESTINATION_GIVING_UP -> destination_free(d_gives_up_for_client)
    fi
}

inline destination_on_stage_received(stage) {
    if
    :: !DESTINATION_HAS_MACHINE -> skip
    :: destination == DESTINATION_RECEIVING && stage == d_stage ->
        destination = DESTINATION_RECEIVED;
        if
        :: d_kind == NOT_LAST -> answer(StageCopied, STAGE(d_stage, d_reservation))
        :: else
        fi
    :: destination == DESTINATION_COMMITTING && stage == d_stage -> adopt(d_has_blocks)
    :: destination == DESTINATION_RESERVING && stage == d_stage -> give_up(0)
    :: else ->
        /* Of a stage that was given up, or of a receiver that is being stopped. */
        assert(stage < d_stage
            || (stage == d_stage && !BETWEEN_STAGES && destination != DESTINATION_RESERVING))
    fi
}

inline destination_on_stage_failed(stage) {
    if
    :: !DESTINATION_HAS_MACHINE -> skip
    :: stage == d_stage && (destination == DESTINATION_RECEIVING
        || destination == DESTINATION_COMMITTING || destination == DESTINATION_RESERVING) ->
        give_up(0)
    :: else ->
        assert(stage < d_stage || (stage == d_stage && !BETWEEN_STAGES))
    fi
}

/* `_settle`: the engine has adopted the request. */
inline destination_on_adopted() {
    if
    :: d_has_source_aborted || d_has_client_aborted -> abort_request_at_b()
    :: else
    fi;
    if
    :: d_has_source_aborted -> destination_end(1)
    :: !d_has_source_aborted && d_is_peer_dead -> destination_over()
    :: else -> destination = DESTINATION_COMMITTED; answer(Committed, d_reservation)
    fi;
#ifdef BREAK_FORGETS_THAT_IT_ADOPTED
    destination_over()
#endif
}

inline destination_on_client_aborted() {
    if
    :: IS_BEFORE_ADOPT -> give_up(1)
    :: destination == DESTINATION_ADOPTING -> d_has_client_aborted = 1
    :: destination == DESTINATION_COMMITTED -> abort_request_at_b()
    :: else
    fi
}

/* `_until_last_stage` does not let itself be cancelled. */
inline destination_on_cancelled() {
    if
    :: destination == DESTINATION_RESERVING || BETWEEN_STAGES -> give_up(0)
    fi
}

inline destination_on_lease_over() {
#ifdef BREAK_SAYS_ABORTED_BUT_GOES_ON
    if
    :: destination == DESTINATION_COMMITTING -> answer(Aborted, ABORTED(0, d_reservation))
    :: else -> give_up(0)
    fi
#else
    give_up(0)
#endif
}

inline destination_on_peer_dead() {
    if
    :: IS_BEFORE_ADOPT -> d_is_peer_dead = 1; give_up(0)
    :: destination == DESTINATION_ADOPTING || IS_GIVEN_UP -> d_is_peer_dead = 1
    :: destination == DESTINATION_COMMITTED -> destination_over()
    :: else
    fi
}
