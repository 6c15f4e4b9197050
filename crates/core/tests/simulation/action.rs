//! What can be done in the small world, and how often.

use super::simulated_worker::WorkerAction;

/// Everything that somebody can do in the small world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum SimulatedAction {
    /// The next prompt.
    Prompt,
    /// Cancel everything.
    Cancel,
    /// Cancel the newest run alone.
    CancelNewest,
    /// Cancel the active run alone.
    CancelActive,
    /// Steer.
    Steer,
    /// Answer the ask, with a yes.
    Allow,
    /// Answer the ask, with a no.
    Deny,
    /// Take the newest run out of the queue.
    Remove,
    /// Empty the queue.
    Clear,
    /// Set the halt.
    Halt,
    /// Lift it.
    Unhalt,
    /// No more agents may live.
    Fill,
    /// They may.
    Free,
    /// Allow everything from now on.
    Policy,
    /// Allow one more restart.
    Forgive,
    /// Close the session.
    Close,
    /// A session below is created.
    Spawn,
    /// This session below has nothing to do any more.
    ChildEnds(u8),
    /// The sessions below have all closed.
    BelowClosed,
    /// The agent does something.
    Agent(WorkerAction),
    /// The agent's process dies.
    Die,
    /// The agent's machine is lost.
    Vanish,
    /// The agent is put to rest.
    Rest,
    /// The connection breaks.
    Break,
    /// The daemon dies after what it commits next, before it acts on it.
    Crash,
    /// The worker is found again, or found to be no more.
    Mend,
    /// The next deadline passes.
    Tick,
}

macro_rules! budget {
    ($($name:ident)*) => {
        /// How often each thing may be done.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(crate) struct ActionBudget { $(pub(crate) $name: u8,)* }

        impl ActionBudget {
            /// Nobody does anything.
            pub(crate) const NOTHING: Self = Self { $($name: 0,)* };
        }
    };
}

budget! {
    prompts cancels single_cancels steers answers removes clears halts fills policies forgives closes spawns suspends
    deaths vanishes rests breaks crashes late asks says
}
