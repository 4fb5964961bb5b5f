//! What holds for every schedule, and what the field's formulas say of each.

use proptest::prelude::*;
use trainyard_schedule::{Costs, Kind, Schedule, ScheduleError, Timeline, simulate};

/// Ranks, micro-batches and stages per rank, of at most 64 stages.
fn shapes() -> impl Strategy<Value = (usize, usize, usize)> {
    (1usize..=8, 1usize..=256).prop_flat_map(|(num_chunks, num_microbatches)| {
        (1usize..=64 / num_chunks).prop_map(move |ranks| (ranks, num_microbatches, num_chunks))
    })
}

fn built(kind: Kind, (ranks, microbatches, chunks): (usize, usize, usize)) -> Schedule {
    let chunks = kind.num_chunks().unwrap_or(chunks);
    kind.build(ranks.min(64 / chunks), microbatches, chunks)
        .unwrap()
}

fn timed(schedule: &Schedule, costs: &Costs) -> Timeline {
    simulate(schedule, costs).unwrap()
}

/// The bubble by formula where it holds: the schedule's own with stages of these costs.
fn bubble(kind: Kind, ranks: usize, [f, i, w]: [f64; 3]) -> f64 {
    let others = (ranks - 1) as f64;
    match kind {
        Kind::ZeroBubbleH1 => others * (f + i + w - 2.0 * w),
        Kind::ZeroBubbleV => 0.0,
        // Beside each other a forward and a backward take as long as one after the other.
        Kind::DualPipeV => others * ((f + i + w) + (i + w) - 3.0 * w),
        // With several stages per rank, costs are those of one.
        _ => others * (f + i + w),
    }
}

/// Micro-batches in flight at `rank`, counted per stage.
fn in_flight(kind: Kind, shape: (usize, usize, usize), rank: usize) -> usize {
    let (ranks, microbatches, chunks) = shape;
    match kind {
        Kind::GPipe | Kind::LoopedBreadthFirst => microbatches * chunks,
        Kind::OneForwardOneBackward => microbatches.min(ranks - rank),
        Kind::Interleaved if chunks == 1 => microbatches.min(ranks - rank),
        Kind::Interleaved => {
            let most = 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1;
            most.min(microbatches * chunks)
        }
        Kind::ZeroBubbleH1 => ranks,
        Kind::ZeroBubbleV => 2 * ranks,
        Kind::DualPipeV => 2 * ranks + 1,
    }
}

/// Whether the formulas hold: enough micro-batches to fill the pipeline, whole groups of them where
/// they go in groups, and for those with parts of backward apart, equal costs.
fn formulas_hold(kind: Kind, (ranks, microbatches, chunks): (usize, usize, usize)) -> bool {
    match kind {
        Kind::Interleaved if chunks > 1 => microbatches.is_multiple_of(ranks),
        Kind::ZeroBubbleV | Kind::DualPipeV => microbatches >= 2 * ranks,
        _ => microbatches >= ranks,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn complete_and_free_of_deadlock(shape in shapes()) {
        for kind in Kind::ALL {
            built(kind, shape).check().unwrap();
        }
    }

    #[test]
    fn bubbles_and_memory_are_the_published_ones(shape in shapes(), forward in 1u8..4) {
        for kind in Kind::ALL {
            let schedule = built(kind, shape);
            let (ranks, microbatches) = (schedule.num_ranks(), schedule.num_microbatches);
            let shape = (ranks, microbatches, schedule.num_stages() / ranks);
            let splits = schedule.tasks().any(|(_, task)| !task.work.releases() && task.work.gives_gradient());
            let costs = match splits {
                true => [1.0; 3],
                false => [f64::from(forward), 1.0, 2.0],
            };
            let timeline = timed(&schedule, &Costs::uniform(costs[0], costs[1], costs[2]));
            let expected = bubble(kind, ranks, costs);
            let most = timeline.most_in_flight();
            if formulas_hold(kind, shape) {
                prop_assert!((timeline.bubble() - expected).abs() < 1e-9,
                    "{kind} {shape:?}: {} not {expected}", timeline.bubble());
                for (rank, &found) in most.iter().enumerate() {
                    prop_assert_eq!(found, in_flight(kind, shape, rank), "{} {:?}", kind, shape);
                }
            } else {
                prop_assert!(timeline.bubble() + 1e-9 >= expected, "{kind} {shape:?} is too good");
                for (rank, &found) in most.iter().enumerate() {
                    prop_assert!(found <= in_flight(kind, shape, rank), "{kind} {shape:?}");
                }
            }
        }
    }

    #[test]
    fn a_file_gives_the_same_schedule(shape in shapes()) {
        for kind in Kind::ALL {
            let schedule = built(kind, (shape.0, shape.1.min(24), shape.2));
            prop_assert_eq!(&Schedule::from_csv(&schedule.to_csv()).unwrap(), &schedule);
        }
    }

    /// No rank starts before it can, and no rank does two things at once.
    #[test]
    fn time_goes_forward(shape in shapes(), transfer in 0u8..3) {
        for kind in Kind::ALL {
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
    fn any_text_is_a_schedule_or_an_error(text in "[0-9FBIW,()A-Z;\\n ]{0,80}") {
        let _ = Schedule::from_csv(&text);
    }
}

#[test]
fn what_cannot_run_is_told_with_who_waits() {
    // Each waits for the other's first.
    let crossed = "0F1,0F0,0B0,0B1\n1F0,1B0,1F1,1B1";
    assert!(Schedule::from_csv(crossed).is_ok());
    let stuck = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1";
    let Err(ScheduleError::Deadlock { waiting }) = Schedule::from_csv(stuck) else {
        panic!("a deadlock was not seen");
    };
    assert_eq!(
        waiting,
        ["rank 0 cannot begin 0B0", "rank 1 cannot begin 1F1"]
    );
}

#[test]
fn what_is_missing_twice_or_misplaced_is_told() {
    let refusal = |text: &str| Schedule::from_csv(text).unwrap_err().to_string();
    assert_eq!(refusal("0F0"), "0B0 is never done");
    assert_eq!(refusal("0F0,0I0"), "0W0 is never done");
    assert_eq!(refusal("0F0,0F0,0B0"), "0F0 is done twice");
    assert_eq!(
        refusal("0F0,1F0,1B0\n0B0"),
        "rank 1 is to do 0B0, but stage 0 is rank 0's"
    );
    assert!(refusal("0X0").contains("is no action"));
    let error = Kind::GPipe.build(4, 8, 2).unwrap_err().to_string();
    assert!(error.contains("use interleaved"), "{error}");
}
