//! Properties of every program: sends match receives, stages are unsharded when they compute, gradients are
//! reduced when they are complete.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use trainyard_schedule::{
    Action, ComputeType, Costs, GradReduction, Instruction, Message, Schedule, ScheduleKind,
    ShardingPolicy, Task, simulate,
};

fn schedules() -> impl Strategy<Value = Schedule> {
    let kinds = prop::sample::select(ScheduleKind::ALL.to_vec());
    (kinds, 1usize..=8, 1usize..=24, 1usize..=4).prop_map(|(kind, ranks, microbatches, chunks)| {
        let chunks = kind.num_chunks().unwrap_or(chunks);
        kind.build(ranks, microbatches, chunks).unwrap()
    })
}

fn policies() -> impl Strategy<Value = ShardingPolicy> {
    let grad_reduction =
        prop::sample::select(vec![GradReduction::Once, GradReduction::EveryBackward]);
    (grad_reduction, prop::option::of(1usize..=4)).prop_map(|(grad_reduction, max_unsharded)| {
        ShardingPolicy {
            grad_reduction,
            max_unsharded,
        }
    })
}

fn needs(schedule: &Schedule, action: &Action) -> Vec<Message> {
    let tasks = action.tasks();
    tasks.filter_map(|task| schedule.recv_for(task)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_send_has_one_receive_posted_before_its_use(
        schedule in schedules(), policy in policies()
    ) {
        let (mut sent, mut posted) = (HashSet::new(), HashSet::new());
        for (rank, list) in schedule.program(policy).ranks.iter().enumerate() {
            let mut made: HashSet<Message> = HashSet::new();
            for instruction in list {
                match instruction {
                    Instruction::Receive(message) => {
                        prop_assert_eq!(schedule.stage_to_rank[message.to], rank);
                        prop_assert!(posted.insert(*message));
                    }
                    Instruction::Compute(action) => {
                        for message in needs(&schedule, action) {
                            prop_assert!(posted.contains(&message), "no receive for {}", instruction);
                        }
                        made.extend(action.tasks().filter_map(|task| schedule.send_for(task)));
                    }
                    Instruction::Send(message) => {
                        prop_assert!(made.remove(message), "{} before its task", instruction);
                        prop_assert!(sent.insert(*message));
                    }
                    _ => {}
                }
            }
            prop_assert!(made.is_empty());
        }
        prop_assert_eq!(sent, posted);
    }

    /// NCCL has no tags.
    #[test]
    fn messages_between_two_ranks_are_received_in_the_order_in_which_they_are_sent(
        schedule in schedules(), policy in policies()
    ) {
        type Order = HashMap<(usize, usize), Vec<Message>>;
        let (mut sent, mut received) = (Order::new(), Order::new());
        let pair = |m: Message| (schedule.stage_to_rank[m.from], schedule.stage_to_rank[m.to]);
        for instruction in schedule.program(policy).ranks.into_iter().flatten() {
            match instruction {
                Instruction::Send(m) => sent.entry(pair(m)).or_default().push(m),
                Instruction::Receive(m) => received.entry(pair(m)).or_default().push(m),
                _ => {}
            }
        }
        prop_assert_eq!(sent, received);
    }

    /// Whatever the costs, the receiver has used a message when its sender waits for the send, so the wait does
    /// not block.
    #[test]
    fn waits_for_sends_do_not_block(
        schedule in schedules(), forward in 1u8..5, input in 1u8..5, weight in 1u8..5
    ) {
        let costs = Costs::uniform(f64::from(forward), f64::from(input), f64::from(weight));
        let timeline = simulate(&schedule, &costs).unwrap();
        let mut used = HashMap::new();
        for span in timeline.ranks.iter().flatten() {
            used.extend(needs(&schedule, &span.action).into_iter().map(|m| (m, span.start)));
        }
        let program = schedule.program(ShardingPolicy::default());
        for (list, spans) in program.ranks.iter().zip(&timeline.ranks) {
            let (mut spans, mut now) = (spans.iter(), 0.0);
            let mut in_flight = HashSet::new();
            for instruction in list {
                match instruction {
                    Instruction::Compute(_) => now = spans.next().unwrap().end,
                    Instruction::Send(message) => prop_assert!(in_flight.insert(*message)),
                    Instruction::WaitSend(message) => {
                        prop_assert!(in_flight.remove(message));
                        prop_assert!(used[message] <= now);
                    }
                    _ => {}
                }
            }
        }
    }

    #[test]
    fn stages_are_unsharded_when_they_compute_within_the_limit(
        schedule in schedules(), most in 1usize..=4
    ) {
        let policy = ShardingPolicy { max_unsharded: Some(most), ..ShardingPolicy::default() };
        for list in schedule.program(policy).ranks {
            let has_pairs = list.iter().any(|i| matches!(i, Instruction::Compute(Action::Overlapped(..))));
            let most = most.max(if has_pairs { 2 } else { 1 });
            let mut unsharded = HashSet::new();
            for instruction in list {
                match instruction {
                    Instruction::Unshard(stage) => prop_assert!(unsharded.insert(stage)),
                    Instruction::Reshard(stage) => prop_assert!(unsharded.remove(&stage)),
                    Instruction::Compute(action) => {
                        let needing = |task: &Task| task.compute_type != ComputeType::BackwardWeight;
                        for task in action.tasks().filter(needing) {
                            prop_assert!(unsharded.contains(&task.stage), "{}", instruction);
                        }
                    }
                    _ => {}
                }
                prop_assert!(unsharded.len() <= most);
            }
            prop_assert!(unsharded.is_empty());
        }
    }

    #[test]
    fn gradients_are_reduced_when_they_are_complete(schedule in schedules(), policy in policies()) {
        for (rank, list) in schedule.program(policy).ranks.into_iter().enumerate() {
            let mut left: HashMap<usize, usize> = HashMap::new();
            for stage in schedule.stages_of(rank) {
                left.insert(stage, schedule.num_microbatches);
            }
            let mut num_reductions: HashMap<usize, usize> = HashMap::new();
            for instruction in list {
                match instruction {
                    Instruction::Compute(action) => {
                        for task in action.tasks().filter(|task| task.compute_type.releases_activations()) {
                            *left.get_mut(&task.stage).unwrap() -= 1;
                        }
                    }
                    Instruction::Reduce(stage) => {
                        *num_reductions.entry(stage).or_default() += 1;
                        if policy.grad_reduction == GradReduction::Once {
                            prop_assert_eq!(left[&stage], 0);
                        }
                    }
                    _ => {}
                }
            }
            let expected = match policy.grad_reduction {
                GradReduction::Once => 1,
                GradReduction::EveryBackward => schedule.num_microbatches,
            };
            prop_assert!(num_reductions.values().all(|&n| n == expected));
            prop_assert_eq!(num_reductions.len(), left.len());
        }
    }
}

/// In 1F1B a gradient that comes back shows that the activation it belongs to was received.
#[test]
fn received_gradients_complete_earlier_sends() {
    let schedule = ScheduleKind::OneForwardOneBackward.build(2, 3, 1).unwrap();
    let program = schedule.program(ShardingPolicy::default());
    let first: Vec<String> = program.ranks[0]
        .iter()
        .map(Instruction::to_string)
        .collect();
    assert_eq!(
        first.join(" "),
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0WAIT_SEND_F0 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B1 \
         0WAIT_SEND_F1 0B2 0WAIT_SEND_F2 0REDUCE_GRAD"
    );
}
