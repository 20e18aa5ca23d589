"""Predict the first digit of scikit-learn, a 0, with a trained network: python examples/predict_digit.py RUN."""

import sys

import numpy as np
from sklearn.datasets import load_digits

import allstep

trained = allstep.load(sys.argv[1])
digit = load_digits().images[0]  # brightness from 0 to 16; the run was trained on 0 to 255
samples = ((digit * 255 + 8) // 16).astype(np.uint8)[np.newaxis, :, :, np.newaxis]
for name, probability in trained.predict(samples, top=2)[0]:
    print(f"{name}: {probability:.3f}")
