/* The migration handshake of src/sterna/migration, for the model checker spin; docs/internals/model.md says
   what is modelled, how it maps to the code, and within which bounds it is checked.

   One request, running or queuing on the instance A, migrates once to the instance B. Two settings:

   - without FAULTS: the network is a set that only grows. Whatever was ever sent may arrive at any
     later time, any number of times, or never; time passes as it likes; each thing that can fail
     may fail whenever it is tried. For safety.
   - with FAULTS=n: every combination of at most n faults (a loss, a repetition, a death, a step of
     time that is too early, ...). For liveness: afterwards all must come to a good end.

   -DBREAK_... leaves one rule of the protocol out; the checker must find each. */

#ifndef STAGES
#define STAGES 2
#endif
#ifndef RESERVATIONS
#define RESERVATIONS 2
#endif

#ifdef FAULTS
byte faults = FAULTS;
bit is_calm; /* No faults any more; and nobody need do what he only may do, such as to abort. */
#define MAY !is_calm
#define FAULT (faults > 0)
#define SPEND faults--
#else
#define FAULT true
#define MAY true
#define SPEND skip
#endif

#include "wire.pml"
#include "world.pml"
#include "source.pml"
#include "destination.pml"
#include "frontend.pml"
#include "processes.pml"
#include "properties.pml"
