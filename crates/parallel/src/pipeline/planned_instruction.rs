//! A rank's program with its gradient synchronization: a reduction starts with the backward that completes the
//! gradients, so that both overlap.

use trainyard_schedule::{ComputeType, Instruction, Task};

use crate::strategy::GradSync;

/// An instruction, and how it synchronizes gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlannedInstruction {
    pub instruction: Instruction,
    /// The synchronization of a backward or of a reduction. [`GradSync::Full`] marks the last one of the stage.
    pub sync: GradSync,
    /// The stage whose reduction this backward starts.
    reduces: Option<usize>,
}

impl PlannedInstruction {
    /// Whether this executes an instruction, as itself or as the reduction that it starts.
    pub(super) fn executes(&self, wanted: Instruction) -> bool {
        let reduction = self.reduces.map(Instruction::Reduce);
        self.instruction == wanted || reduction == Some(wanted)
    }
}

/// Plans the instructions of a rank: merges a reduction into the full backward right before it.
pub(super) fn plan(instructions: Vec<Instruction>) -> Vec<PlannedInstruction> {
    let mut plan: Vec<PlannedInstruction> = Vec::with_capacity(instructions.len());
    for (number, &instruction) in instructions.iter().enumerate() {
        let Instruction::Reduce(stage) = instruction else {
            plan.push(PlannedInstruction {
                instruction,
                sync: GradSync::None,
                reduces: None,
            });
            continue;
        };
        let is_last = !instructions[number + 1..].contains(&instruction);
        let sync = if is_last {
            GradSync::Full
        } else {
            GradSync::ShardOnly
        };
        let computes = |planned: &&mut PlannedInstruction| {
            matches!(planned.instruction, Instruction::Compute(_))
        };
        match plan.iter_mut().rev().find(computes) {
            Some(planned) if is_full_backward(planned.instruction, stage) => {
                planned.sync = sync;
                planned.reduces = Some(stage);
            }
            _ => plan.push(PlannedInstruction {
                instruction,
                sync,
                reduces: None,
            }),
        }
    }
    plan
}

fn is_full_backward(instruction: Instruction, stage: usize) -> bool {
    let is_it = |task: Task| task.stage == stage && task.compute_type == ComputeType::Backward;
    match instruction {
        Instruction::Compute(action) => action.tasks().any(is_it),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use trainyard_schedule::{GradReduction, ScheduleKind, ShardingPolicy};

    use super::*;

    fn plan_of(kind: ScheduleKind, grad_reduction: GradReduction) -> Vec<PlannedInstruction> {
        let schedule = kind.build(2, 3, 1).unwrap();
        let policy = ShardingPolicy {
            grad_reduction,
            max_unsharded: None,
        };
        plan(schedule.program(policy).ranks.swap_remove(0))
    }

    #[test]
    fn only_the_last_backward_reduces_once_per_step() {
        let plan = plan_of(ScheduleKind::OneForwardOneBackward, GradReduction::Once);
        let reducing: Vec<&PlannedInstruction> =
            plan.iter().filter(|p| p.sync != GradSync::None).collect();
        let [only] = reducing[..] else {
            panic!("{reducing:?}")
        };
        assert_eq!(only.instruction.to_string(), "0B2");
        assert!(only.executes(Instruction::Reduce(0)));
    }

    #[test]
    fn every_backward_reduces_under_that_policy() {
        let plan = plan_of(
            ScheduleKind::OneForwardOneBackward,
            GradReduction::EveryBackward,
        );
        let syncs: Vec<GradSync> = plan.iter().map(|planned| planned.sync).collect();
        let reducing = syncs.into_iter().filter(|sync| *sync != GradSync::None);
        assert!(reducing.eq([GradSync::ShardOnly, GradSync::ShardOnly, GradSync::Full]));
    }

    #[test]
    fn deferred_weight_gradients_are_reduced_after_they_are_computed() {
        let plan = plan_of(ScheduleKind::ZeroBubbleH1, GradReduction::Once);
        let last = plan
            .last()
            .map(|planned| (planned.instruction, planned.sync));
        assert_eq!(last, Some((Instruction::Reduce(0), GradSync::Full)));
    }
}
