"""Operations per element, as ELECTRA counts them (Clark et al., 2020, released code)."""

NORM, SOFTMAX, ACTIVATION, DROPOUT, ADD = 5, 5, 8, 4, 1
