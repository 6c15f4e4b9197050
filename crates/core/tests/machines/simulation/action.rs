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
    /// Move the newest run to the front of the queue.
    MoveNewestToFront,
    /// Move the first queued run to the end.
    MoveFirstToEnd,
    Halt,
    Unhalt,
    /// Another session of the account reports that its quota is exhausted.
    QuotaReachedElsewhere,
    /// The quota resets, or a person releases it.
    ReleaseQuota,
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
    /// Settings change for which the next run needs another agent.
    Outdate,
    /// The next input and the one after it arrive together: both are judged before their effects are carried out.
    Batch,
    /// No further input arrives for the batch: its effects are carried out.
    EndBatch,
    /// The connection breaks.
    Break,
    /// The daemon dies after its next commit, before it carries out the effects.
    Crash,
    /// The machine is rebooted: daemon and worker are gone, and so is what the clocks showed.
    Reboot,
    /// Somebody sets the wall clock three hours back.
    SetClockBack,
    /// Somebody sets the wall clock two hours forward.
    SetClockForward,
    /// The worker is found again, or found to be gone.
    Mend,
    /// The next deadline passes.
    Tick,
}

impl SimulatedAction {
    /// A client's command, which can be judged in one batch with others.
    pub(crate) fn is_command(self) -> bool {
        matches!(
            self,
            Self::Prompt
                | Self::Cancel
                | Self::CancelNewest
                | Self::CancelActive
                | Self::Steer
                | Self::Allow
                | Self::Deny
                | Self::Remove
                | Self::Clear
                | Self::MoveNewestToFront
                | Self::MoveFirstToEnd
                | Self::Policy
                | Self::Forgive
                | Self::Close
        )
    }
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
    prompts cancels single_cancels steers answers removes clears moves halts quotas fills policies forgives closes
    spawns suspends deaths vanishes rests breaks crashes reboots clock_changes late asks says leaves batches outdates
    failed_preparations
}
