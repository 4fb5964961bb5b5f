//! The closed forms of pipelines against following every action.

use proptest::prelude::*;
use trainyard_plan::{StageTime, bubble, in_flight, zero_bubble_h1};
use trainyard_schedule::{Costs, Kind, simulate};

/// How much longer a step takes than one rank's work, and what each rank keeps.
fn followed(kind: Kind, pp: usize, m: usize, v: usize, rank: StageTime) -> (f64, Vec<usize>) {
    let chunks = v as f64;
    let costs = Costs::uniform(
        rank.forward / chunks,
        rank.backward_input / chunks,
        rank.backward_weight / chunks,
    );
    let schedule = kind.build(pp, m, v).unwrap();
    let timeline = simulate(&schedule, &costs).unwrap();
    let waits = timeline.end() - m as f64 * rank.whole();
    (waits, timeline.most_in_flight())
}

/// How long a step of ZB-H1 takes on a first rank, equal ones and a last.
fn unequal([first, between, last]: [StageTime; 3], pp: usize, m: usize) -> f64 {
    let each = (0..pp).map(|rank| match rank {
        0 => first,
        rank if rank + 1 == pp => last,
        _ => between,
    });
    let each = each.map(|time| (time.forward, time.backward_input, time.backward_weight));
    let schedule = Kind::ZeroBubbleH1.build(pp, m, 1).unwrap();
    let costs = Costs::of_stages(&each.collect::<Vec<_>>());
    simulate(&schedule, &costs).unwrap().end()
}

fn kept(kind: Kind, pp: usize, m: usize, v: usize) -> Vec<usize> {
    (0..pp)
        .map(|rank| in_flight(kind, pp, m, v, rank))
        .collect()
}

fn parts() -> impl Strategy<Value = StageTime> {
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
    fn gpipe_and_one_forward_one_backward(pp in 1usize..9, m in 1usize..24, rank in parts()) {
        for kind in [Kind::GPipe, Kind::OneForwardOneBackward] {
            let (waits, flight) = followed(kind, pp, m, 1, rank);
            prop_assert!((waits - bubble(kind, pp, m, 1, rank)).abs() < 1e-9);
            prop_assert_eq!(flight, kept(kind, pp, m, 1));
        }
    }

    #[test]
    fn interleaved(pp in 2usize..7, groups in 1usize..5, v in 1usize..5, rank in parts()) {
        let (kind, m) = (Kind::Interleaved, pp * groups);
        let (waits, flight) = followed(kind, pp, m, v, rank);
        prop_assert!((waits - bubble(kind, pp, m, v, rank)).abs() < 1e-9);
        prop_assert_eq!(flight, kept(kind, pp, m, v));
    }

    #[test]
    fn a_last_group_that_is_not_full_never_takes_longer(
        pp in 2usize..7, m in 2usize..30, v in 1usize..5, rank in parts()
    ) {
        let (waits, flight) = followed(Kind::Interleaved, pp, m, v, rank);
        prop_assert!(waits <= bubble(Kind::Interleaved, pp, m, v, rank) + 1e-9);
        let bound = kept(Kind::Interleaved, pp, m, v);
        prop_assert!(flight.iter().zip(bound).all(|(found, most)| *found <= most));
    }

    #[test]
    fn zero_bubble_h1_on_equal_ranks(pp in 2usize..9, more in 0usize..16, rank in parts()) {
        let (kind, m) = (Kind::ZeroBubbleH1, 2 * pp + more);
        let (waits, flight) = followed(kind, pp, m, 1, rank);
        let ours = bubble(kind, pp, m, 1, rank);
        prop_assert!((waits - ours).abs() < 1e-9, "{waits} {ours}");
        prop_assert_eq!(flight, kept(kind, pp, m, 1));
    }

    /// The usual case: the last rank has the head as well. Then it is exact; whatever ranks are, it is
    /// never too long.
    #[test]
    fn zero_bubble_h1_on_ranks_that_differ(
        pp in 2usize..9, more in 0usize..16, between in parts(), head in parts(), first in parts()
    ) {
        let m = 2 * pp + more;
        let last = StageTime {
            forward: between.forward + head.forward,
            backward_input: between.backward_input + head.backward_input,
            backward_weight: between.backward_weight + head.backward_weight,
        };
        let usual = [between, between, last];
        let (ours, followed) = (zero_bubble_h1(usual, pp, m), unequal(usual, pp, m));
        prop_assert!((ours - followed).abs() < 1e-9, "{ours} {followed}");
        let any = [first, between, head];
        prop_assert!(zero_bubble_h1(any, pp, m) <= unequal(any, pp, m) + 1e-9);
    }

    #[test]
    fn v_shapes_are_near(pp in 2usize..9, more in 0usize..16, input in 0.8f64..1.3, weight in 0.8f64..1.1) {
        let rank = StageTime { forward: 1.0, backward_input: input, backward_weight: weight };
        for kind in [Kind::ZeroBubbleV, Kind::DualPipeV] {
            let m = 2 * pp + more;
            let (waits, flight) = followed(kind, pp, m, 2, rank);
            let ours = bubble(kind, pp, m, 2, rank);
            let step = m as f64 * rank.whole();
            prop_assert!((waits - ours).abs() < 0.03 * step, "{kind}: {waits} {ours} of {step}");
            prop_assert_eq!(flight, kept(kind, pp, m, 2));
        }
    }
}
