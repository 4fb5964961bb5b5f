//! Tick marks of an axis.

/// Round numbers from 0 to `highest` with at most `num` steps, as numbers and as labels.
pub(crate) fn ticks(highest: f64, num: u32) -> Vec<(f64, String)> {
    let (step, num_decimals) = round_step(highest / f64::from(num.max(1)));
    (0..=num)
        .map(|index| f64::from(index) * step)
        // The last tick must not be lost to rounding.
        .take_while(|tick| *tick <= highest * (1.0 + 1e-9))
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
        ticks(highest, num)
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

    proptest! {
        #[test]
        fn ticks_fill_the_axis(highest in 1e-6f64..1e15, num in 1u32..12) {
            let found = ticks(highest, num);
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
