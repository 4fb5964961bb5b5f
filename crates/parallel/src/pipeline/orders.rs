//! A rank's program as it is carried out: a reduction begins with the backward that completes it.

use trainyard_schedule::{Instruction, Task, Work};

use crate::strategy::Sync;

/// An instruction, and what becomes of the gradients with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Order {
    pub instruction: Instruction,
    /// Of a backward: what becomes of its stage's gradients. Of a reduction: whether it is the last.
    pub sync: Sync,
    /// A reduction that this backward begins, so that it goes on while gradients come.
    begins: Option<usize>,
}

impl Order {
    /// Whether an instruction is carried out with this.
    pub(super) fn does(&self, wanted: Instruction) -> bool {
        let begins = self.begins.map(Instruction::Reduce);
        self.instruction == wanted || begins == Some(wanted)
    }
}

/// The orders of a rank. A whole backward takes the reduction that follows it along.
pub(super) fn orders(instructions: Vec<Instruction>) -> Vec<Order> {
    let mut orders: Vec<Order> = Vec::with_capacity(instructions.len());
    for (number, &instruction) in instructions.iter().enumerate() {
        let Instruction::Reduce(stage) = instruction else {
            orders.push(Order {
                instruction,
                sync: Sync::Keep,
                begins: None,
            });
            continue;
        };
        let is_last = !instructions[number + 1..].contains(&instruction);
        let sync = if is_last {
            Sync::Reduce
        } else {
            Sync::Accumulate
        };
        let computing = |order: &&mut Order| matches!(order.instruction, Instruction::Compute(_));
        match orders.iter_mut().rev().find(computing) {
            Some(order) if is_whole_backward(order.instruction, stage) => {
                order.sync = sync;
                order.begins = Some(stage);
            }
            _ => orders.push(Order {
                instruction,
                sync,
                begins: None,
            }),
        }
    }
    orders
}

fn is_whole_backward(instruction: Instruction, stage: usize) -> bool {
    let is_it = |task: Task| task.stage == stage && task.work == Work::Backward;
    match instruction {
        Instruction::Compute(action) => action.tasks().any(is_it),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use trainyard_schedule::{Kind, Reductions, Sharing};

    use super::*;

    fn orders_of(kind: Kind, reductions: Reductions) -> Vec<Order> {
        let schedule = kind.build(2, 3, 1).unwrap();
        let sharing = Sharing {
            reductions,
            most_unsharded: None,
        };
        orders(schedule.program(sharing).ranks.swap_remove(0))
    }

    #[test]
    fn the_last_backward_reduces_and_those_before_keep() {
        let orders = orders_of(Kind::OneForwardOneBackward, Reductions::Once);
        let reducing: Vec<&Order> = orders.iter().filter(|o| o.sync != Sync::Keep).collect();
        let [only] = reducing[..] else {
            panic!("{reducing:?}")
        };
        assert_eq!(only.instruction.to_string(), "0B2");
        assert!(only.does(Instruction::Reduce(0)));
    }

    #[test]
    fn each_backward_reduces_where_that_is_wanted() {
        let orders = orders_of(Kind::OneForwardOneBackward, Reductions::Each);
        let syncs: Vec<Sync> = orders.iter().map(|order| order.sync).collect();
        let reducing = syncs.into_iter().filter(|sync| *sync != Sync::Keep);
        assert!(reducing.eq([Sync::Accumulate, Sync::Accumulate, Sync::Reduce]));
    }

    #[test]
    fn weights_that_come_later_are_reduced_after_them() {
        let orders = orders_of(Kind::ZeroBubbleH1, Reductions::Once);
        let last = orders.last().map(|order| (order.instruction, order.sync));
        assert_eq!(last, Some((Instruction::Reduce(0), Sync::Reduce)));
    }
}
