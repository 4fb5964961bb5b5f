//! Properties of every schedule, and the published formulas of each.

use proptest::prelude::*;
use trainyard_schedule::{
    Costs, Schedule, ScheduleError, ScheduleKind, Timeline, in_flight, simulate,
};

/// Ranks, micro-batches and stages per rank, of at most 64 stages.
fn shapes() -> impl Strategy<Value = (usize, usize, usize)> {
    (1usize..=8, 1usize..=256).prop_flat_map(|(num_chunks, num_microbatches)| {
        (1usize..=64 / num_chunks).prop_map(move |ranks| (ranks, num_microbatches, num_chunks))
    })
}

fn built(kind: ScheduleKind, (ranks, microbatches, chunks): (usize, usize, usize)) -> Schedule {
    let chunks = kind.num_chunks().unwrap_or(chunks);
    kind.build(ranks.min(64 / chunks), microbatches, chunks)
        .unwrap()
}

fn timed(schedule: &Schedule, costs: &Costs) -> Timeline {
    simulate(schedule, costs).unwrap()
}

/// The bubble by formula, with stages of the given costs.
fn bubble(kind: ScheduleKind, ranks: usize, [f, i, w]: [f64; 3]) -> f64 {
    let others = (ranks - 1) as f64;
    match kind {
        ScheduleKind::ZeroBubbleH1 => others * (f + i + w - 2.0 * w),
        ScheduleKind::ZeroBubbleV => 0.0,
        // Overlapped, a forward and a backward take as long here as one after the other.
        ScheduleKind::DualPipeV => others * ((f + i + w) + (i + w) - 3.0 * w),
        // With several stages per rank, the costs are those of one stage.
        _ => others * (f + i + w),
    }
}

/// Whether the formulas apply: enough micro-batches to fill the pipeline, and complete groups of them for
/// interleaved schedules.
fn formulas_hold(kind: ScheduleKind, (ranks, microbatches, chunks): (usize, usize, usize)) -> bool {
    match kind {
        ScheduleKind::Interleaved if chunks > 1 => microbatches.is_multiple_of(ranks),
        ScheduleKind::ZeroBubbleV | ScheduleKind::DualPipeV => microbatches >= 2 * ranks,
        _ => microbatches >= ranks,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn schedules_are_complete_and_deadlock_free(shape in shapes()) {
        for kind in ScheduleKind::ALL {
            built(kind, shape).check().unwrap();
        }
    }

    #[test]
    fn bubbles_and_memory_match_the_papers(shape in shapes(), forward in 1u8..4) {
        for kind in ScheduleKind::ALL {
            let schedule = built(kind, shape);
            let (ranks, microbatches) = (schedule.num_ranks(), schedule.num_microbatches);
            let shape = (ranks, microbatches, schedule.num_stages() / ranks);
            let splits = schedule.tasks().any(|(_, task)| !task.compute_type.releases_activations() && task.compute_type.produces_input_grad());
            let costs = if splits {
[1.0; 3]
} else {
[f64::from(forward), 1.0, 2.0]
};
            let timeline = timed(&schedule, &Costs::uniform(costs[0], costs[1], costs[2]));
            let expected = bubble(kind, ranks, costs);
            let most = timeline.max_in_flight();
            if formulas_hold(kind, shape) {
                prop_assert!((timeline.bubble() - expected).abs() < 1e-9,
                    "{kind} {shape:?}: {} not {expected}", timeline.bubble());
                for (rank, &found) in most.iter().enumerate() {
                    prop_assert_eq!(found, in_flight(kind, ranks, microbatches, shape.2, rank), "{} {:?}", kind, shape);
                }
            } else {
                prop_assert!(timeline.bubble() + 1e-9 >= expected, "{kind} {shape:?}: the bubble is too small");
                for (rank, &found) in most.iter().enumerate() {
                    prop_assert!(found <= in_flight(kind, ranks, microbatches, shape.2, rank), "{kind} {shape:?}");
                }
            }
        }
    }

    #[test]
    fn schedules_round_trip_through_csv(shape in shapes()) {
        for kind in ScheduleKind::ALL {
            let schedule = built(kind, (shape.0, shape.1.min(24), shape.2));
            prop_assert_eq!(&Schedule::from_csv(&schedule.to_csv()).unwrap(), &schedule);
        }
    }

    /// No rank runs two actions at once, and slower transfers do not make a step faster.
    #[test]
    fn actions_of_a_rank_do_not_overlap(shape in shapes(), transfer in 0u8..3) {
        for kind in ScheduleKind::ALL {
            let schedule = built(kind, shape);
            let mut costs = Costs::uniform(1.0, 1.5, 0.5);
            costs.transfer = f64::from(transfer);
            let timeline = timed(&schedule, &costs);
            for spans in &timeline.ranks {
                prop_assert!(spans.windows(2).all(|pair| pair[0].end <= pair[1].start));
            }
            costs.transfer += 1.0;
            let slower = timed(&schedule, &costs);
            prop_assert!(slower.end() >= timeline.end());
        }
    }

    #[test]
    fn arbitrary_text_parses_or_fails_cleanly(text in "[0-9FBIW,()A-Z;\\n ]{0,80}") {
        let _ = Schedule::from_csv(&text);
    }
}

#[test]
fn a_deadlock_names_the_blocked_ranks() {
    // Out of order, but no rank waits for the other in a cycle.
    let crossed = "0F1,0F0,0B0,0B1\n1F0,1B0,1F1,1B1";
    assert!(Schedule::from_csv(crossed).is_ok());
    let stuck = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1";
    let Err(ScheduleError::Deadlock { waiting }) = Schedule::from_csv(stuck) else {
        panic!("the deadlock was not detected");
    };
    assert_eq!(
        waiting,
        ["rank 0 waits to start 0B0", "rank 1 waits to start 1F1"]
    );
}

#[test]
fn missing_repeated_and_misplaced_tasks_are_rejected() {
    let error = |text: &str| Schedule::from_csv(text).unwrap_err().to_string();
    assert_eq!(error("0F0"), "task 0B0 is missing");
    assert_eq!(error("0F0,0I0"), "task 0W0 is missing");
    assert_eq!(error("0F0,0F0,0B0"), "task 0F0 is scheduled twice");
    assert_eq!(
        error("0F0,1F0,1B0\n0B0"),
        "rank 1 has task 0B0, but stage 0 belongs to rank 0"
    );
    assert!(error("0X0").contains("is not a schedule action"));
    let error = ScheduleKind::GPipe.build(4, 8, 2).unwrap_err().to_string();
    assert!(error.contains("use interleaved"), "{error}");
}
