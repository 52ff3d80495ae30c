"""Beginnings of texts of a domain, which the model goes on from when it writes its own calibration text.

Written for this purpose, and short: what is calibrated on is what the model makes of them. They are in English; a model of
other languages shows those in the share of its texts that begins at random.
"""

from __future__ import annotations

from mla_cli.calibration.material import Content

MATH: tuple[Content, ...] = (
    "Question: A bakery sells rolls in bags of 6 and bags of 10. On Saturday it sold 14 small bags and 9 large bags. How many "
    "rolls did it sell?\nAnswer:",
    "Question: Mira reads 18 pages on each school day and 35 pages on each day of the weekend. How many weeks does she need "
    "for a book of 480 pages?\nAnswer:",
    "Question: A tank holds 240 litres. One pipe fills it in 8 hours, another in 12 hours. How long do both take together?"
    "\nAnswer:",
    "Question: Tom has three times as many marbles as Ana. After he gives her 14 of them, both have the same number. How many "
    "did each have at first?\nAnswer:",
    "Question: The price of a coat fell by 20 % and then rose by 15 %. It now costs 138 euros. What did it cost at first?"
    "\nAnswer:",
    "Question: A train leaves at 9:40 and travels 315 km at 90 km/h, with a stop of 12 minutes. When does it arrive?\nAnswer:",
    "Question: A farmer has hens and rabbits, 35 heads and 94 legs in all. How many rabbits are there?\nAnswer:",
    "Question: Four friends share a bill of $86.40 and add a tip of 15 %. How much does each of them pay?\nAnswer:",
    "Question: A recipe for 4 people takes 350 g of flour, 2 eggs and 180 ml of milk. How much of each is needed for 10 people?"
    "\nAnswer:",
    "Question: A garden is 3 m longer than it is wide and has an area of 108 square metres. How long is its fence?\nAnswer:",
    "Problem: Solve the equation $3x - 7 = 2(x + 5) - 4$.\nSolution: We",
    "Problem: Find all real numbers $x$ with $x^2 - 5x + 6 = 0$.\nSolution:",
    "Problem: Solve the system $2x + 3y = 12$, $x - y = 1$.\nSolution: From the second equation",
    "Problem: Compute $\\int_0^1 x e^x \\, dx$.\nSolution: Integrate by parts, with",
    "Problem: Find the derivative of $f(x) = \\frac{\\sin x}{1 + x^2}$.\nSolution: By the quotient rule,",
    "Problem: Two dice are thrown. What is the probability that their sum is at least 9?\nSolution: There are 36",
    "Problem: A bag holds 5 red and 7 blue balls. Two are drawn without replacement. Find the probability that they differ in "
    "colour.\nSolution:",
    "Problem: In a right triangle one leg is 9 cm and the hypotenuse is 15 cm. Find the area and the height on the hypotenuse."
    "\nSolution:",
    "Problem: In how many ways can 8 people sit around a round table?\nSolution: Since rotations",
    "Problem: What is the remainder of $7^{100}$ on division by 13?\nSolution: By Fermat's little theorem,",
    "Problem: The sum of the first 20 terms of an arithmetic progression is 650 and its first term is 4. Find the difference."
    "\nSolution:",
    "Theorem. The square root of 2 is irrational.\n\nProof. Suppose that",
    "Theorem. There are infinitely many prime numbers.\n\nProof. Let",
    "Theorem. For every natural number $n$, $1 + 2 + \\dots + n = \\frac{n(n+1)}{2}$.\n\nProof. By induction on $n$.",
    "Lemma. If $f$ is continuous on $[a, b]$ and differentiable on $(a, b)$, then there is a point $c$ with",
    "Definition. A group is a set $G$ with an operation such that",
    "Exercise 4. Convert 2.75 hours to minutes and 3,600 metres to kilometres.\nSolution.",
    "Exercise 11. Round 48.3672 to two decimal places, and write 0.00052 in scientific notation.\nSolution.",
    "Let's work through this step by step. We are given that the perimeter of a rectangle is 54 cm and that",
    "To find the greatest common divisor of 252 and 198, we use Euclid's algorithm:\n252 =",
    "Multiply 347 by 28.\n347 * 28 = 347 * 20 + 347 * 8 =",
    "The table shows the number of visitors on each day of a week: Monday 120, Tuesday 95, Wednesday 143, Thursday 110, "
    "Friday 187. The mean is",
)


def _asked(text: str) -> Content:
    return [{"role": "user", "content": text}]


def _after(first: str, reply: str, then: str) -> Content:
    return [
        {"role": "user", "content": first},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": then},
    ]


CHAT: tuple[Content, ...] = (
    _asked("Hi! Can you help me plan a weekend in Lisbon with two small children?"),
    _asked("What is the difference between a virus and a bacterium? Please keep it short."),
    _asked("Write a polite e-mail to my landlord: the heating has been off for three days."),
    _asked("I can't sleep lately. What could I try before I see a doctor?"),
    _asked("Explain how a bicycle stays upright to a ten-year-old."),
    _asked("Give me five ideas for a birthday present for my father, who likes gardening and old films."),
    _asked("Summarise the plot of Romeo and Juliet in four sentences."),
    _asked("Translate into French: The meeting has been moved to Thursday at half past two."),
    _asked("Which is better for a beginner, the guitar or the piano, and why?"),
    _asked("Write a short poem about the first snow of the year."),
    _asked("How do I get red wine out of a white tablecloth?"),
    _asked("I have an interview tomorrow. Ask me three questions and tell me what a good answer would contain."),
    _asked("Make a table with the planets of the solar system, their diameters and how long their years are."),
    _asked("What should I cook with chickpeas, spinach, a lemon and some rice?"),
    _asked("Correct this sentence and say what was wrong: Their going to the store yesterday."),
    _asked("Why was the printing press so important for Europe?"),
    _asked("Tell me a joke that is fit for the office."),
    _asked("Is it safe to charge my phone overnight?"),
    _asked("Draft a plan to learn Spanish in six months, with half an hour a day."),
    _asked("My sister and I argue about our mother's house. How can we talk about it calmly?"),
    _asked("What does the word 'ubiquitous' mean? Use it in two sentences."),
    _asked("List the advantages and the drawbacks of working from home."),
    _asked("Continue the story: The lighthouse had been dark for years when Elin saw a light in its window."),
    _asked("How many time zones does Russia have?"),
    _after(
        "What is the capital of Australia?",
        "The capital of Australia is Canberra.",
        "Why is it not Sydney?",
    ),
    _after(
        "Recommend a novel for a long flight.",
        "You might enjoy 'The Count of Monte Cristo': a long tale of betrayal and revenge that never slows down.",
        "I've read that one. Something newer, perhaps?",
    ),
    _after(
        "How long do I boil an egg?",
        "About six minutes for a soft yolk, nine for a firm one.",
        "And at 2,000 metres above the sea?",
    ),
    _after(
        "Can you write a slogan for my café?",
        "'Good mornings start here.'",
        "Nice, but it opens only in the evening.",
    ),
    _after(
        "Please shorten this: We would like to inform you that your order has been dispatched.",
        "Your order has been dispatched.",
        "Now make it sound more friendly.",
    ),
    _after(
        "I feel a bit down today.",
        "I'm sorry to hear that. Would you like to tell me what happened?",
        "I didn't get the job I hoped for.",
    ),
    _after(
        "What is inflation?",
        "Inflation is a general rise in prices: the same money buys less over time.",
        "So is it always bad?",
    ),
    _after(
        "Give me a recipe for pancakes.",
        "Whisk 2 eggs, 250 ml of milk and 125 g of flour with a pinch of salt, and fry thin layers in butter.",
        "Could I make them without eggs?",
    ),
)

CODE: tuple[Content, ...] = (
    'def merge_sorted(left, right):\n    """Merge two sorted lists into one sorted list."""\n',
    "import argparse\nimport csv\nfrom pathlib import Path\n\n\ndef main() -> None:\n    parser = argparse.ArgumentParser(",
    "class LRUCache:\n    def __init__(self, capacity: int) -> None:\n        self.capacity = capacity\n",
    "import pytest\n\nfrom shop.cart import Cart\n\n\ndef test_total_of_an_empty_cart_is_zero():\n",
    "@app.route('/users/<int:user_id>', methods=['GET'])\ndef get_user(user_id):\n",
    "import numpy as np\n\n\ndef softmax(x, axis=-1):\n",
    "async def fetch_all(urls: list[str]) -> dict[str, bytes]:\n    async with aiohttp.ClientSession() as session:\n",
    "const express = require('express');\nconst app = express();\n\napp.get('/api/items', async (req, res) => {\n",
    "function debounce(callback, delay) {\n  let timer = null;\n",
    "import React, { useEffect, useState } from 'react';\n\nexport default function TodoList({ items }) {\n",
    "interface User {\n  id: number;\n  name: string;\n  email?: string;\n}\n\nexport function groupBy<T>(",
    "package com.example.bank;\n\nimport java.util.ArrayList;\nimport java.util.List;\n\npublic class Account {\n",
    "@Override\npublic boolean equals(Object other) {\n",
    "#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n\nstruct node {\n    char *key;\n",
    "static int parse_header(const uint8_t *data, size_t length, struct header *out)\n{\n",
    "#include <algorithm>\n#include <iostream>\n#include <vector>\n\ntemplate <typename T>\nclass Matrix {\npublic:\n",
    'package main\n\nimport (\n\t"fmt"\n\t"net/http"\n)\n\nfunc handler(w http.ResponseWriter, r *http.Request) {\n',
    "func (s *Stack[T]) Pop() (T, error) {\n",
    "use std::collections::HashMap;\nuse std::io::{self, BufRead};\n\nfn count_words(text: &str) -> HashMap<String, usize> {\n",
    "impl<T: Ord> BinaryTree<T> {\n    pub fn insert(&mut self, value: T) -> bool {\n",
    "using System;\nusing System.Linq;\n\nnamespace Shop.Orders\n{\n    public record OrderLine(",
    "class Invoice < ApplicationRecord\n  belongs_to :customer\n  validates :number, presence: true\n\n  def total\n",
    "<?php\n\nnamespace App\\Http\\Controllers;\n\nclass PostController extends Controller\n{\n    public function store(",
    "#!/usr/bin/env bash\nset -euo pipefail\n\nbackup_dir=${1:?usage: $0 DIR}\n\nfor file in ",
    "SELECT c.name, COUNT(o.id) AS orders, SUM(o.total) AS revenue\nFROM customers AS c\nLEFT JOIN orders AS o ON",
    "CREATE TABLE employees (\n    id INTEGER PRIMARY KEY,\n    name VARCHAR(120) NOT NULL,\n",
    "data class Point(val x: Double, val y: Double)\n\nfun List<Point>.centroid(): Point {\n",
    "import SwiftUI\n\nstruct ContentView: View {\n    @State private var count = 0\n\n    var body: some View {\n",
    "module Parser where\n\nimport Data.Char (isDigit, isSpace)\n\nnewtype Parser a = Parser { runParser :: String -> ",
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n  <meta charset="utf-8">\n  <title>Sign in</title>\n',
    ".card {\n  display: flex;\n  flex-direction: column;\n",
    "version: '3.8'\nservices:\n  web:\n    build: .\n    ports:\n      - \"8000:8000\"\n",
)
