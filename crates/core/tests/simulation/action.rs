//! The actions in the simulation, and how often each may be taken.

use super::simulated_worker::WorkerAction;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum SimulatedAction {
    /// A client sends the next prompt.
    Prompt,
    /// Cancel all runs.
    Cancel,
    /// Cancel only the newest run.
    CancelNewest,
    /// Cancel only the active run.
    CancelActive,
    Steer,
    Allow,
    Deny,
    /// Remove the newest run from the queue.
    Remove,
    /// Clear the queue.
    Clear,
    Halt,
    Unhalt,
    /// The limit on live agents is reached.
    Fill,
    /// A slot is free again.
    Free,
    /// Set the policy to allow everything.
    Policy,
    /// Allow one more restart.
    Forgive,
    Close,
    /// A child session is created.
    Spawn,
    /// This child session becomes idle.
    ChildEnds(u8),
    /// The child sessions have all closed.
    BelowClosed,
    Agent(WorkerAction),
    /// The agent's process dies.
    Die,
    /// The agent's machine is lost.
    Vanish,
    /// The idle agent is stopped.
    Rest,
    /// The connection breaks.
    Break,
    /// The daemon dies after its next commit, before it carries out the effects.
    Crash,
    /// The worker is found again, or found to be gone.
    Mend,
    /// The next deadline passes.
    Tick,
}

macro_rules! budget {
    ($($name:ident)*) => {
        /// How many times each action may be taken.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(crate) struct ActionBudget { $(pub(crate) $name: u8,)* }

        impl ActionBudget {
            pub(crate) const NOTHING: Self = Self { $($name: 0,)* };
        }
    };
}

budget! {
    prompts cancels single_cancels steers answers removes clears halts fills policies forgives closes spawns suspends
    deaths vanishes rests breaks crashes late asks says leaves
}
