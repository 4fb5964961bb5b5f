//! The closed-form formulas of pipeline schedules against a simulation of every action.

use proptest::prelude::*;
use trainyard_schedule::{
    Costs, ScheduleKind, StageTime, bubble, in_flight, simulate, zero_bubble_h1,
};

/// The simulated pipeline bubble, and the maximum number of in-flight micro-batches on each rank.
fn simulated(
    kind: ScheduleKind,
    pp: usize,
    m: usize,
    v: usize,
    rank: StageTime,
) -> (f64, Vec<usize>) {
    let chunks = v as f64;
    let costs = Costs::uniform(
        rank.forward / chunks,
        rank.backward_input / chunks,
        rank.backward_weight / chunks,
    );
    let schedule = kind.build(pp, m, v).unwrap();
    let timeline = simulate(&schedule, &costs).unwrap();
    let bubble = timeline.end() - m as f64 * rank.total();
    (bubble, timeline.max_in_flight())
}

/// The simulated step time of ZB-H1 on a first rank, equal middle ranks and a last rank.
fn simulated_unequal([first, between, last]: [StageTime; 3], pp: usize, m: usize) -> f64 {
    let each = (0..pp).map(|rank| match rank {
        0 => first,
        rank if rank + 1 == pp => last,
        _ => between,
    });
    let each = each.map(|time| (time.forward, time.backward_input, time.backward_weight));
    let schedule = ScheduleKind::ZeroBubbleH1.build(pp, m, 1).unwrap();
    let costs = Costs::per_stage(&each.collect::<Vec<_>>());
    simulate(&schedule, &costs).unwrap().end()
}

fn in_flight_formula(kind: ScheduleKind, pp: usize, m: usize, v: usize) -> Vec<usize> {
    (0..pp)
        .map(|rank| in_flight(kind, pp, m, v, rank))
        .collect()
}

fn stage_times() -> impl Strategy<Value = StageTime> {
    (0.2f64..2.0, 0.2f64..2.0, 0.2f64..2.0).prop_map(
        |(forward, backward_input, backward_weight)| StageTime {
            forward,
            backward_input,
            backward_weight,
        },
    )
}

proptest! {
    #[test]
    fn gpipe_and_1f1b_are_exact(pp in 1usize..9, m in 1usize..24, rank in stage_times()) {
        for kind in [
            ScheduleKind::GPipe,
            ScheduleKind::OneForwardOneBackward,
            ScheduleKind::EagerOneForwardOneBackward,
        ] {
            let (simulated_bubble, flight) = simulated(kind, pp, m, 1, rank);
            prop_assert!((simulated_bubble - bubble(kind, pp, m, 1, rank)).abs() < 1e-9);
            prop_assert_eq!(flight, in_flight_formula(kind, pp, m, 1));
        }
    }

    #[test]
    fn interleaved_is_exact(pp in 2usize..7, groups in 1usize..5, v in 1usize..5, rank in stage_times()) {
        let (kind, m) = (ScheduleKind::Interleaved, pp * groups);
        let (simulated_bubble, flight) = simulated(kind, pp, m, v, rank);
        prop_assert!((simulated_bubble - bubble(kind, pp, m, v, rank)).abs() < 1e-9);
        prop_assert_eq!(flight, in_flight_formula(kind, pp, m, v));
    }

    #[test]
    fn an_incomplete_last_group_is_never_slower(
        pp in 2usize..7, m in 2usize..30, v in 1usize..5, rank in stage_times()
    ) {
        let (simulated_bubble, flight) = simulated(ScheduleKind::Interleaved, pp, m, v, rank);
        prop_assert!(simulated_bubble <= bubble(ScheduleKind::Interleaved, pp, m, v, rank) + 1e-9);
        let bound = in_flight_formula(ScheduleKind::Interleaved, pp, m, v);
        prop_assert!(flight.iter().zip(bound).all(|(found, most)| *found <= most));
    }

    #[test]
    fn zero_bubble_h1_is_exact_on_equal_ranks(pp in 2usize..9, more in 0usize..16, rank in stage_times()) {
        let (kind, m) = (ScheduleKind::ZeroBubbleH1, 2 * pp + more);
        let (simulated_bubble, flight) = simulated(kind, pp, m, 1, rank);
        let ours = bubble(kind, pp, m, 1, rank);
        prop_assert!((simulated_bubble - ours).abs() < 1e-9, "{simulated_bubble} {ours}");
        prop_assert_eq!(flight, in_flight_formula(kind, pp, m, 1));
    }

    /// If only the last rank differs, because it also has the head, the formula is exact. For other ranks it is a
    /// lower bound.
    #[test]
    fn zero_bubble_h1_on_unequal_ranks(
        pp in 2usize..9, more in 0usize..16, between in stage_times(), head in stage_times(), first in stage_times()
    ) {
        let m = 2 * pp + more;
        let last = StageTime {
            forward: between.forward + head.forward,
            backward_input: between.backward_input + head.backward_input,
            backward_weight: between.backward_weight + head.backward_weight,
        };
        let usual = [between, between, last];
        let (ours, exact) = (zero_bubble_h1(usual, pp, m), simulated_unequal(usual, pp, m));
        prop_assert!((ours - exact).abs() < 1e-9, "{ours} {exact}");
        let any = [first, between, head];
        prop_assert!(zero_bubble_h1(any, pp, m) <= simulated_unequal(any, pp, m) + 1e-9);
    }

    #[test]
    fn formulas_of_v_schedules_are_close(pp in 2usize..9, more in 0usize..16, input in 0.8f64..1.3, weight in 0.8f64..1.1) {
        let rank = StageTime { forward: 1.0, backward_input: input, backward_weight: weight };
        for kind in [ScheduleKind::ZeroBubbleV, ScheduleKind::DualPipeV] {
            let m = 2 * pp + more;
            let (simulated_bubble, flight) = simulated(kind, pp, m, 2, rank);
            let ours = bubble(kind, pp, m, 2, rank);
            let step = m as f64 * rank.total();
            prop_assert!((simulated_bubble - ours).abs() < 0.03 * step, "{kind}: {simulated_bubble} {ours} of {step}");
            prop_assert_eq!(flight, in_flight_formula(kind, pp, m, 2));
        }
    }
}
