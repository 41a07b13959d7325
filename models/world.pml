/* The two instances, their engines, and the copies between them. */

mtype:where = { RUNNING, QUEUING, DRAINED, GONE };

/* Effects that have an outcome, of which at most one is under way on a side, and the outcomes. */
mtype:effect = { Inspect, Drain, ReserveBlocks, FreeReservation, Adopt };
mtype:event = {
    Inspected, InspectedGone, Drained, DrainRefused, DrainRefusedTooManyBlocks, BlocksReserved,
    ReserveFailed, ReservationFreed, Adopted, AdoptFailed
};

bit a_is_alive = 1;
bit b_is_alive = 1;
bit a_knows_b_dead;
bit b_knows_a_dead;

/* ------------------------------------------------------------------------------------ instance A */

mtype:where at_a = RUNNING;
bit drained_queuing; /* Whether it was drained from the queue. */
bit num_preemptions;
bit mode_recompute;
bit a_holds = 1; /* Memory of the request; one unit stands for all its blocks. */
bit a_free;
bit a_moved_out; /* Llumlet._moved_out: where the request went from here. */

inline a_frees() {
    if
    :: a_holds -> a_holds = 0; assert(!a_free); a_free = 1
    :: else
    fi
}

inline a_takes() { assert(a_free); a_free = 0; a_holds = 1 }

/* ------------------------------------------------------------------------------------ instance B */

#define B_BLOCKS (STAGES + 2)

bit at_b; /* The engine steps it. */
bit b_ever_adopted;
bit b_moved_out;
byte b_free = B_BLOCKS;
byte b_reserved;
byte b_holds;

/* ---------------------------------------------------------------------------------------- copies */

byte copying;   /* A bit for each stage that A is sending. */
byte listening; /* ... that receivers of B wait for. */
byte received;  /* StageReceived, told to nobody yet. */
byte failed;    /* StageFailed. */
byte copy_failed; /* CopyFailed, on A. */

/* What the checks alone know: stages that this conversation copies, and those whose blocks are in
   place on B with the right contents. */
byte must_be_copied;
byte is_in_place;

/* ------------------------------------------------------------------------------- all that happens */

bit is_ended;    /* It finished, or was aborted, where it ran. */
bit client_gone;
bit is_continued; /* ... from its tokens, after all had denied it. */
bit at_c;        /* It runs on a third instance: continued there, or moved on from B. */

#define A_STEPS (a_is_alive && (at_a == RUNNING || at_a == QUEUING))
#define B_STEPS (b_is_alive && at_b)

/* Abort what A's engine has (AbortRequest); one that is not there is ignored. */
inline abort_request_at_a() {
    if
    :: at_a == RUNNING || at_a == QUEUING -> at_a = GONE; a_frees(); is_ended = is_ended | !is_continued
    :: else -> assert(at_a == GONE) /* A drained request is not ended so. */
    fi
}

inline abort_request_at_b() {
    if
    :: at_b -> at_b = 0; b_free = b_free + b_holds; b_holds = 0;
        is_ended = is_ended | !is_continued
    :: else
    fi
}
