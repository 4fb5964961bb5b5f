//! What holds for every program: messages that are sent are asked for, stages are there when they are
//! needed, gradients are reduced when they are complete.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use trainyard_schedule::{
    Action, Costs, Instruction, Kind, Message, Reductions, Schedule, Sharing, Task, Work, simulate,
};

fn schedules() -> impl Strategy<Value = Schedule> {
    let kinds = prop::sample::select(Kind::ALL.to_vec());
    (kinds, 1usize..=8, 1usize..=24, 1usize..=4).prop_map(|(kind, ranks, microbatches, chunks)| {
        let chunks = kind.num_chunks().unwrap_or(chunks);
        kind.build(ranks, microbatches, chunks).unwrap()
    })
}

fn sharings() -> impl Strategy<Value = Sharing> {
    let reductions = prop::sample::select(vec![Reductions::Once, Reductions::Each]);
    (reductions, prop::option::of(1usize..=4)).prop_map(|(reductions, most_unsharded)| Sharing {
        reductions,
        most_unsharded,
    })
}

fn needs(schedule: &Schedule, action: &Action) -> Vec<Message> {
    let tasks = action.tasks();
    tasks.filter_map(|task| schedule.needs(task)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_sent_is_asked_for_once_and_before_it_is_used(
        schedule in schedules(), sharing in sharings()
    ) {
        let (mut sent, mut asked) = (HashSet::new(), HashSet::new());
        for (rank, list) in schedule.program(sharing).ranks.iter().enumerate() {
            let mut made: HashSet<Message> = HashSet::new();
            for instruction in list {
                match instruction {
                    Instruction::Receive(message) => {
                        prop_assert_eq!(schedule.holders[message.to], rank);
                        prop_assert!(asked.insert(*message));
                    }
                    Instruction::Compute(action) => {
                        for message in needs(&schedule, action) {
                            prop_assert!(asked.contains(&message), "{} is not asked for", instruction);
                        }
                        made.extend(action.tasks().filter_map(|task| schedule.gives(task)));
                    }
                    Instruction::Send(message) => {
                        prop_assert!(made.remove(message), "{} before it is made", instruction);
                        prop_assert!(sent.insert(*message));
                    }
                    _ => {}
                }
            }
            prop_assert!(made.is_empty());
        }
        prop_assert_eq!(sent, asked);
    }

    /// Whatever the costs, the other rank has begun to use a message when its sender lets go of it.
    #[test]
    fn what_is_said_to_have_arrived_has(
        schedule in schedules(), forward in 1u8..5, input in 1u8..5, weight in 1u8..5
    ) {
        let costs = Costs::uniform(f64::from(forward), f64::from(input), f64::from(weight));
        let timeline = simulate(&schedule, &costs).unwrap();
        let mut used = HashMap::new();
        for span in timeline.ranks.iter().flatten() {
            used.extend(needs(&schedule, &span.action).into_iter().map(|m| (m, span.start)));
        }
        let program = schedule.program(Sharing::default());
        for (list, spans) in program.ranks.iter().zip(&timeline.ranks) {
            let (mut spans, mut now) = (spans.iter(), 0.0);
            let mut under_way = HashSet::new();
            for instruction in list {
                match instruction {
                    Instruction::Compute(_) => now = spans.next().unwrap().end,
                    Instruction::Send(message) => prop_assert!(under_way.insert(*message)),
                    Instruction::Arrived(message) => {
                        prop_assert!(under_way.remove(message));
                        prop_assert!(used[message] <= now);
                    }
                    _ => {}
                }
            }
        }
    }

    #[test]
    fn stages_are_gathered_when_they_compute_and_no_more_than_may_be(
        schedule in schedules(), most in 1usize..=4
    ) {
        let sharing = Sharing { most_unsharded: Some(most), ..Sharing::default() };
        for list in schedule.program(sharing).ranks {
            let has_pairs = list.iter().any(|i| matches!(i, Instruction::Compute(Action::Both(..))));
            let most = most.max(if has_pairs { 2 } else { 1 });
            let mut gathered = HashSet::new();
            for instruction in list {
                match instruction {
                    Instruction::Unshard(stage) => prop_assert!(gathered.insert(stage)),
                    Instruction::Reshard(stage) => prop_assert!(gathered.remove(&stage)),
                    Instruction::Compute(action) => {
                        let needing = |task: &Task| task.work != Work::BackwardWeight;
                        for task in action.tasks().filter(needing) {
                            prop_assert!(gathered.contains(&task.stage), "{}", instruction);
                        }
                    }
                    _ => {}
                }
                prop_assert!(gathered.len() <= most);
            }
            prop_assert!(gathered.is_empty());
        }
    }

    #[test]
    fn gradients_are_reduced_when_they_are_complete(schedule in schedules(), sharing in sharings()) {
        for (rank, list) in schedule.program(sharing).ranks.into_iter().enumerate() {
            let mut left: HashMap<usize, usize> = HashMap::new();
            for stage in schedule.stages_of(rank) {
                left.insert(stage, schedule.num_microbatches);
            }
            let mut num_reductions: HashMap<usize, usize> = HashMap::new();
            for instruction in list {
                match instruction {
                    Instruction::Compute(action) => {
                        for task in action.tasks().filter(|task| task.work.releases()) {
                            *left.get_mut(&task.stage).unwrap() -= 1;
                        }
                    }
                    Instruction::Reduce(stage) => {
                        *num_reductions.entry(stage).or_default() += 1;
                        if sharing.reductions == Reductions::Once {
                            prop_assert_eq!(left[&stage], 0);
                        }
                    }
                    _ => {}
                }
            }
            let expected = match sharing.reductions {
                Reductions::Once => 1,
                Reductions::Each => schedule.num_microbatches,
            };
            prop_assert!(num_reductions.values().all(|&n| n == expected));
            prop_assert_eq!(num_reductions.len(), left.len());
        }
    }
}

/// In 1F1B every rank but the last hears of every activation it sent, with the gradient that comes back.
#[test]
fn answers_show_what_has_arrived() {
    let schedule = Kind::OneForwardOneBackward.build(2, 3, 1).unwrap();
    let program = schedule.program(Sharing::default());
    let first: Vec<String> = program.ranks[0]
        .iter()
        .map(Instruction::to_string)
        .collect();
    assert_eq!(
        first.join(" "),
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0ARRIVED_F0 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B1 \
         0ARRIVED_F1 0B2 0ARRIVED_F2 0REDUCE_GRAD"
    );
}
