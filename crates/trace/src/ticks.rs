//! Tick marks of an axis.

/// Round numbers from `lowest` to `highest` with at most `num` steps, as numbers and as labels.
pub fn ticks(lowest: f64, highest: f64, num: u32) -> Vec<(f64, String)> {
    let (step, num_decimals) = round_step((highest - lowest) / f64::from(num.max(1)));
    // Neither the first nor the last tick must be lost to rounding.
    let first = (lowest / step - 1e-9).ceil();
    let slack = 1e-9 * (highest - lowest);
    (0..=num)
        .map(|index| (first + f64::from(index)) * step)
        .take_while(|tick| *tick <= highest + slack)
        .map(|tick| (tick, format!("{tick:.num_decimals$}")))
        .collect()
}

/// The smallest of 1, 2 and 5 times a power of ten that is not below `min`, and its number of decimals.
fn round_step(min: f64) -> (f64, usize) {
    if !(min.is_finite() && min > 0.0) {
        return (1.0, 0);
    }
    let exponent = min.log10().floor() as i32;
    let power = 10f64.powi(exponent);
    let is_enough = |(factor, _): &(f64, i32)| factor * power >= min * (1.0 - 1e-9);
    let candidates = [(1.0, 0), (2.0, 0), (5.0, 0), (10.0, 1)];
    let (factor, carry) = candidates.into_iter().find(is_enough).unwrap_or((10.0, 1));
    let num_decimals = usize::try_from(-(exponent + carry)).unwrap_or(0);
    (factor * power, num_decimals)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn texts(highest: f64, num: u32) -> Vec<String> {
        ticks(0.0, highest, num)
            .into_iter()
            .map(|(_, text)| text)
            .collect()
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(texts(39.1, 5), ["0", "10", "20", "30"]);
        assert_eq!(texts(1.3, 6), ["0.0", "0.5", "1.0"]);
        assert_eq!(
            texts(1.0, 10),
            [
                "0.0", "0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "1.0"
            ]
        );
        assert_eq!(texts(0.0, 5), ["0"]);
    }

    #[test]
    fn an_axis_may_begin_anywhere() {
        let found: Vec<String> = ticks(1.13, 1.49, 4)
            .into_iter()
            .map(|tick| tick.1)
            .collect();
        assert_eq!(found, ["1.2", "1.3", "1.4"]);
    }

    proptest! {
        #[test]
        fn ticks_fill_the_axis(highest in 1e-6f64..1e15, num in 1u32..12) {
            let found = ticks(0.0, highest, num);
            // A round step is at most 2.5 times the exact one.
            prop_assert!(found.len() >= (num as usize * 2).div_ceil(5));
            prop_assert!(found.len() <= num as usize + 1);
            for (tick, text) in &found {
                prop_assert!((0.0..=highest * 1.000_001).contains(tick));
                let written: f64 = text.parse().unwrap();
                prop_assert!((written - tick).abs() <= 1e-9 * highest);
            }
        }
    }
}
