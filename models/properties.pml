/* What must hold. */

#define NUM_OWNERS (A_STEPS + B_STEPS + at_c)
/* What has ended does not go on, but for two things: an abort may still be on its way to the engine,
   and the source of a dead destination repeats what only that knew. */
#define ONE_OWNER \
    (NUM_OWNERS <= 1 && !(is_ended && NUM_OWNERS > 0 && !client_gone && a_is_alive && b_is_alive))
#define IS_UNWANTED (client_gone || is_ended)
#define A_CONSERVES (!a_is_alive || a_holds + a_free == 1)
#define B_CONSERVES (!b_is_alive || b_free + b_reserved + b_holds == B_BLOCKS)

/* Both sides have forgotten the migration, and nothing of it is left in memory. */
#define IS_FORGOTTEN \
    (!SOURCE_HAS_MACHINE && !DESTINATION_HAS_MACHINE && at_a != DRAINED && b_reserved == 0 \
    && listening == 0 && copying == 0)
/* Without the front end's search a request may die with its instance. */
#ifdef WITHOUT_RECOVERY
#define MAY_BE_LOST (!a_is_alive || !b_is_alive)
#else
#define MAY_BE_LOST false
#endif
#define HAS_ENDED_WELL \
    (is_in_doubt == 0 && ((!IS_UNWANTED && NUM_OWNERS == 1) \
        || ((IS_UNWANTED || MAY_BE_LOST) && NUM_OWNERS == 0)))

#ifdef FAULTS
ltl ends_well { <>[] (IS_FORGOTTEN && HAS_ENDED_WELL) }
#else
ltl one_owner { [] (ONE_OWNER && A_CONSERVES && B_CONSERVES) }
#endif
